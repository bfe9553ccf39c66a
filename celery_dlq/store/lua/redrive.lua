-- Purpose: publish letters' messages on a broker that is this database, and remove the letters.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 groups (zset)
--       6 ends (zset)  7 newest_groups (zset)  8 gone_groups (stream)  9 operation (hash)
--       10 receipts (hash)  11 and more: queues of the broker (list), and runs of messages with a
--       seed (hash)
-- ARGV: 1 owner
--       2 previous_run_prefix (claims of owners with this prefix are taken over; empty = none)
--       3 call (its id; a call that is sent again gets the reply of the first time)
--       4 lists (number of the last list in KEYS)
--       5 ttl (milliseconds for which a seeded count is kept)
--       6... in turn for each letter: letter ids (at most 500); its stream position (empty = it is
--       in a file, and perhaps here); its reason; its fingerprint; number of its list in KEYS; its
--       message as kombu writes it; its seed (JSON text: number of its run in KEYS, then names and
--       values; empty = none)
-- Returns: a text of one digit per letter: 1 = CLAIMED (published and removed), 2 = RECLAIMED
--          (the same, but an interrupted redrive may have published it before), 3 = PUBLISHED
--          (before; only removed), 4 = HELD (by a live operation), 5 = GONE
-- Complexity: O(number of letters)
local REDRIVEN_EXPIRE_MILLIS = 604800000  -- a week
-- include: claim_state
-- include: removal
-- include: receipt
local call, states, done, time = ARGV[3] .. '|', {}, 0, redis.call('TIME')
local now, last = time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HGET', KEYS[9], 'last')
if last and string.sub(last, 1, #call) == call then return string.sub(last, #call + 1) end
-- Nothing is undone when a script fails. What may refuse a command below (a full or read-only
-- Redis, a missing permission, a key of another type) refuses these, which change nothing.
for i = 11, tonumber(ARGV[4]) do redis.call('LLEN', KEYS[i]) end
redis.call('ZADD', KEYS[5], 'XX', 0, '')
for _, place in ipairs({2, 10}) do redis.call('HDEL', KEYS[place], '') end
redis.call('XDEL', KEYS[1], '0-1')
local exported = redis.call('HEXISTS', KEYS[3], 'exported') == 1
for i = 6, #ARGV, 7 do
  local id, entry, list, seed, state = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 4]), ARGV[i + 6], 5
  local filed, here = entry == '', redis.call('HGET', KEYS[2], id)
  if filed then entry = here end
  if filed and not here or not seen[entry] and here == entry then
    state = claim_state(redis.call('HGET', KEYS[4], id), ARGV[1], ARGV[2], now)
    local once = filed or exported
    if state <= 2 and once and had_receipt(KEYS[10], id) then state = entry and 3 or 5 end
    if state <= 2 and seed ~= '' then
      seed = cjson.decode(seed)
      local run = seed[1]
      redis.call('HSET', KEYS[run], unpack(seed, 2))
      redis.call('PEXPIRE', KEYS[run], ARGV[5])
    end
    if state <= 2 then redis.call('LPUSH', KEYS[list], ARGV[i + 5]) end
    if state <= 2 and once then had_receipt(KEYS[10], id, true) end
    if state <= 3 and entry then note(entry, id, ARGV[i + 2], ARGV[i + 3]) end
    if state <= 3 then claims[#claims + 1], done = id, done + 1 end
  end
  states[#states + 1] = state
end
remove_noted()
if done > 0 then
  redis.call('HSET', KEYS[9], 'last', call .. table.concat(states))
  for _, state in ipairs(states) do redis.call('HINCRBY', KEYS[9], state, 1) end
  redis.call('PEXPIRE', KEYS[9], REDRIVEN_EXPIRE_MILLIS)
end
return table.concat(states)
