-- Purpose: replace or delete the state of a job, if nobody has changed it.
-- KEYS: 1 jobs (hash)
-- ARGV: 1 job id
--       2 the state that is to be there (text)
--       3 the new state (text; empty deletes the job)
-- Returns: 1 = REPLACED, 0 = CHANGED
-- Complexity: O(1)
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('PERSIST', KEYS[1])  -- changes nothing; OOM-safe order, see README
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
