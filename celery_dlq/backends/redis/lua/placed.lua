-- Purpose: record that a letter is in its queue on the broker; delete the message's counters.
-- KEYS: 1 placing (hash)  2 arrivals (hash)  3 run (hash)
-- ARGV: 1 letter id
--       2 retries (header of the message)
--       3 ttl (milliseconds for which late copies of the message are recognised)
-- Returns: 1 the first time, then 0
-- Complexity: O(1)
local ARRIVALS_EXPIRE_MILLIS = 3660000  -- an hour and a minute
local noted = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3])
-- A late copy of the message must not run with a fresh count.
redis.call('HSET', KEYS[3], 'dead:' .. ARGV[2], 1)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
if noted == 1 then
  local minute = math.floor(redis.call('TIME')[1] / 60)
  local slot = redis.call('HGET', KEYS[2], minute % 60)
  local seen = slot and tonumber(string.match(slot, '^' .. minute .. ':(%d+)$')) or 0
  redis.call('HSET', KEYS[2], minute % 60, minute .. ':' .. seen + 1)
  redis.call('PEXPIRE', KEYS[2], ARRIVALS_EXPIRE_MILLIS)
end
return noted
