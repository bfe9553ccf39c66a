-- Purpose: save or delete the state of a job; list it if it waits to be run.
-- KEYS: 1 jobs (hash)  2 waiting_jobs (zset)  3 cancel_requests (hash)  4 instructions (hash)
-- ARGV: 1 job id
--       2 the state that is to be there (text; empty = any)
--       3 the new state (text; empty deletes the job)
--       4 start (milliseconds since 1970 from which it may be run; empty = it does not wait)
-- Returns: {1, number of jobs, its cancellation request or ''} if it is saved, else {0, 0, ''}
-- Complexity: O(log N), N jobs that wait
local there = redis.call('HGET', KEYS[1], ARGV[1]) or ''
-- The caller's own state, sent again after a timeout, gets the same reply.
if ARGV[2] ~= '' and there ~= ARGV[2] and there ~= ARGV[3] then return {0, 0, ''} end
redis.call('PERSIST', KEYS[1])  -- changes nothing; OOM-safe order, see README
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
if ARGV[4] == '' then
  redis.call('ZREM', KEYS[2], ARGV[1])
else
  redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
  if tonumber(ARGV[4]) <= tonumber(redis.call('TIME')[1]) * 1000 then  -- workers notice
    redis.call('HINCRBY', KEYS[4], 'revision', 1)
  end
end
return {1, redis.call('HLEN', KEYS[1]), redis.call('HGET', KEYS[3], ARGV[1]) or ''}
