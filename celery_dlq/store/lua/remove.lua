-- Purpose: remove letters with their index, tally and claims: to the bin, or for good.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 groups (zset)
--       6 ends (zset)  7 newest_groups (zset)  8 gone_groups (stream)  9 bin (stream)
--       10 binned (hash)  11 late_copies (zset)  12 operation (hash)
-- ARGV: 1 owner (only letters that it has claimed; empty = all)
--       2 keep (milliseconds in the bin; 0 = for good)
--       3 wanted (1 = somebody wants them gone: what comes of their messages later may run; 0 = not)
--       4 operation (its id: what it removes is counted, and noted in the bin; empty = none)
--       5... letter ids, or stream positions of entries that are not letters (at most 500)
-- Returns: the number of letters removed; of an operation, by all of its calls
-- Complexity: O(number of ids and of overdue letters in the bin, at most 200)
local MAX_OVERDUE = 200  -- so the bin empties faster than it fills
local OPERATION_EXPIRE_MILLIS = 2592000000  -- 30 days
local MAX_PARTS = 4000  -- of an entry that can move to the bin: Lua's unpack has a limit
-- include: removal
local owner, keep, filed = ARGV[1], tonumber(ARGV[2]), 0
if keep > 0 then
  redis.call('PEXPIRE', KEYS[9], keep)  -- OOM-safe order, see README
  local overdue = string.format('%.0f', redis.call('TIME')[1] * 1000 - keep)
  for _, entry in ipairs(redis.call('XRANGE', KEYS[9], '-', overdue, 'COUNT', MAX_OVERDUE)) do
    redis.call('HDEL', KEYS[10], entry[2][2])  -- the value of the first field, ~key
    redis.call('XDEL', KEYS[9], entry[1])
  end
end
for i = 5, #ARGV do
  local id, claim = ARGV[i], redis.call('HGET', KEYS[4], ARGV[i])
  if owner == '' or (claim and string.match(claim, '^%a+|(.*)|%d+$') == owner) then
    local indexed = redis.call('HGET', KEYS[2], id)
    local entry = indexed or string.match(id, '^%d+%-%d+$')
    local found = entry and not seen[entry] and redis.call('XRANGE', KEYS[1], entry, entry)[1]
    if found and (keep == 0 or #found[2] < MAX_PARTS) then
      if keep > 0 then
        local place = redis.call('XADD', KEYS[9], '*', '~key', id, '~job', ARGV[4], unpack(found[2]))
        redis.call('HSET', KEYS[10], id, place)
        redis.call('PEXPIRE', KEYS[9], keep)
        redis.call('PEXPIRE', KEYS[10], keep)
      end
      local letter = {}
      for n = 1, #found[2], 2 do letter[found[2][n]] = found[2][n + 1] end
      local name = letter.id or id
      local tallied = indexed or redis.call('HGET', KEYS[2], name) == entry
      note(entry, name, tallied and letter.reason, tallied and letter.fingerprint)
    elseif not found then
      ids[#ids + 1] = id
      if claim and owner ~= '' then filed = filed + (string.match(claim, '^published|') and 1 or 0) end
    end
    if ARGV[3] == '1' then redis.call('ZREM', KEYS[11], id) end
    claims[#claims + 1] = id
  end
end
local removed = remove_noted() + filed  -- published letters that were in a file only
if ARGV[4] == '' then return removed end
if removed > 0 then
  redis.call('HINCRBY', KEYS[12], 'removed', removed)
  redis.call('PEXPIRE', KEYS[12], OPERATION_EXPIRE_MILLIS)
end
return tonumber(redis.call('HGET', KEYS[12], 'removed') or '0')
