-- Purpose: store a letter, index and tally it, and delete the message's counters.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 run (hash)  5 groups (zset)
--       6 arrivals (hash)  7 ends (zset)
-- ARGV: 1 letter id
--       2 reason
--       3 fingerprint
--       4 dead_lettered_at (microseconds since 1970)
--       5 facts of the group (JSON text: task_name, reason, exception_type)
--       6 retries (header of the message)
--       7 ttl (milliseconds for which late copies of the message are recognised)
--       8 end (microseconds since 1970 when its message expires; empty = never)
--       9... names and values of the letter's entry, in turn
-- Returns: 1 = STORED, 0 = ALREADY_THERE (only the counters are deleted)
-- Complexity: O(number of fields)
local MINUTE_MICROS = 60000000
local ARRIVALS_EXPIRE_MILLIS = 3660000  -- an hour and a minute
local id, fingerprint, at = ARGV[1], ARGV[3], ARGV[4]
local function forget()
  redis.call('DEL', KEYS[4])
  -- A late copy of the message must not run with a fresh count.
  redis.call('HSET', KEYS[4], 'dead:' .. ARGV[6], 1)
  redis.call('PEXPIRE', KEYS[4], ARGV[7])
end
if redis.call('HEXISTS', KEYS[2], id) == 1 then
  forget()
  return 0
end
local entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 9))
redis.call('HSET', KEYS[2], id, entry)
-- An expiry that is past by the clock of Redis is left out, or retention would remove the letter
-- before anybody saw it: the worker's clock is wrong, or the letter waited in a spool.
local stored = tonumber(string.match(entry, '^%d+')) * 1000
if tonumber(ARGV[8] ~= '' and ARGV[8] or 0) > stored then
  redis.call('ZADD', KEYS[7], ARGV[8], id)
end
redis.call('HINCRBY', KEYS[3], 'reason:' .. ARGV[2], 1)
redis.call('ZINCRBY', KEYS[5], 1, fingerprint)
local group = redis.call('HGET', KEYS[3], 'group:' .. fingerprint)
local first = group and string.match(group, '^[^|]*') or at
redis.call('HSET', KEYS[3], 'group:' .. fingerprint, table.concat({first, at, id, ARGV[5]}, '|'))
local minute = math.floor(stored / MINUTE_MICROS)
local slot = redis.call('HGET', KEYS[6], minute % 60)
local seen = slot and tonumber(string.match(slot, '^' .. minute .. ':(%d+)$')) or 0
redis.call('HSET', KEYS[6], minute % 60, minute .. ':' .. seen + 1)
redis.call('PEXPIRE', KEYS[6], ARRIVALS_EXPIRE_MILLIS)
forget()
return 1
