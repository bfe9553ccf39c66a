-- Purpose: record that a letter is in its queue on the broker; delete the message's counters.
-- KEYS: 1 placing (hash)  2 arrivals (hash)  3 run (hash)  4 states (hash)
-- ARGV: 1 letter id
--       2 retries (header of the message)
--       3 ttl (milliseconds for which late copies of the message are recognised)
--       4 reason
--       5 fingerprint
--       6 dead_lettered_at (microseconds since 1970)
--       7 release (of the code that failed, without "," and "|"; empty = unknown)
-- Returns: 1 = STORED, 2 = REGRESSED (its group was resolved), 0 = ALREADY_THERE
-- Complexity: O(1)
local time = redis.call('TIME')
-- include: arrival
-- include: state
local noted = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3])
-- A late copy of the message must not run with a fresh count.
redis.call('HSET', KEYS[3], 'dead:' .. ARGV[2], 1)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
if noted == 0 then return 0 end
count_arrival(math.floor(time[1] / 60), ARGV[4])
local changed = regressed(redis.call('HGET', KEYS[4], ARGV[5]), ARGV[6], ARGV[7], ARGV[1])
if changed then redis.call('HSET', KEYS[4], ARGV[5], changed) end
return changed and 2 or 1
