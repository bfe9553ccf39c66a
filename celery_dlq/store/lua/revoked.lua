-- Purpose: note when operators revoked tasks, by the clock of Redis; forget what is old.
-- KEYS: 1 revoked (zset)
-- ARGV: 1 kept (microseconds)
--       2 most (number of tasks)
--       3... of each task its name and its age (microseconds since it was revoked)
-- Returns: the number of noted tasks
-- Complexity: O(N log M), N given, M noted
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1])  -- OOM-safe order, see README
for place = 3, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], 'GT', now - ARGV[place + 1], ARGV[place])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[2])
redis.call('PEXPIRE', KEYS[1], math.floor(ARGV[1] / 1000))
return redis.call('ZCARD', KEYS[1])
