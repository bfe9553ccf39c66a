-- Purpose: record that a letter is in its queue on the broker; delete the message's counters.
-- KEYS: 1 placing (hash)  2 arrivals (hash)  3 run (hash)
-- ARGV: 1 letter id
--       2 retries (header of the message)
--       3 ttl (milliseconds for which late copies of the message are recognised)
--       4 reason
-- Returns: 1 the first time, then 0
-- Complexity: O(1)
local time = redis.call('TIME')
-- include: arrival
local noted = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3])
-- A late copy of the message must not run with a fresh count.
redis.call('HSET', KEYS[3], 'dead:' .. ARGV[2], 1)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
if noted == 1 then count_arrival(math.floor(time[1] / 60), ARGV[4]) end
return noted
