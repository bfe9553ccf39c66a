-- Purpose: acquire, renew, annotate, end or age a lease about a dead-letter queue.
-- KEYS: 1 leases (hash)
-- ARGV: 1 what (take, keep, note or end)
--          or forget (it is as old as can be until it is used again; any owner)
--       2 name (what the lease is the right to)
--       3 owner
--       4 lease (milliseconds until it is free unless renewed)
--       5 state (for note: the text to store)
-- Returns: {1, state} if the owner has it, else {0, "owner|end of the lease"}
-- Complexity: O(1); O(number of names) for a new name among many
local LEASES_EXPIRE_MILLIS = 7776000000  -- 90 days
local MOST_NAMES = 1000
local what, name, owner, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
redis.call('PEXPIRE', KEYS[1], LEASES_EXPIRE_MILLIS)  -- OOM-safe order, see README
local held = redis.call('HGET', KEYS[1], name)
if what == 'forget' then
  local holder, state = string.match(held or '', '^([^|]*)|%d+|(.*)$')
  if holder then redis.call('HSET', KEYS[1], name, holder .. '|0|' .. state) end
  return {holder and 1 or 0, ''}
end
if not held and redis.call('HLEN', KEYS[1]) >= MOST_NAMES then  -- forget the oldest
  local all, oldest, first = redis.call('HGETALL', KEYS[1]), nil, math.huge
  for n = 1, #all, 2 do
    local ends = tonumber(string.match(all[n + 1], '^[^|]*|(%d+)|') or 0)
    if ends < first then oldest, first = all[n], ends end
  end
  redis.call('HDEL', KEYS[1], oldest)
end
held = held or '|0|'
local holder, ends, state = string.match(held, '^([^|]*)|(%d+)|(.*)$')
if not holder then holder, ends, state = '', '0', '' end  -- damaged: as if nobody had it
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if holder ~= owner and (what ~= 'take' or (holder ~= '' and tonumber(ends) > now)) then
  return {0, holder .. '|' .. ends}
end
if what == 'note' then state = ARGV[5] end
if what == 'end' then owner, lease = '', 0 end
redis.call('HSET', KEYS[1], name, string.format('%s|%.0f|%s', owner, now + lease, state))
redis.call('PEXPIRE', KEYS[1], LEASES_EXPIRE_MILLIS)
return {1, state}
