-- Purpose: count the start of a message's first delivery; the worker does not wait.
-- KEYS: 1 run (hash)
-- ARGV: 1 retries (header of the message)
--       2 start (microseconds since 1970, "|", "pid@hostname#token:release")
--       3 ttl (milliseconds, sliding)
--       4 kept (maximum of starts per retries number, and of retries numbers)
-- Returns: the number of the delivery
-- Complexity: O(1)
local retries, start, kept = ARGV[1], ARGV[2], tonumber(ARGV[4])
local count = 'count:' .. retries
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then  -- OOM-safe order, see README
  -- The usual case: nothing is recorded yet.
  redis.call('HSET', KEYS[1], count, 1, 'start:' .. retries .. ':1', start)
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 1
end
redis.call('HDEL', KEYS[1], 'dead:' .. retries)  -- for example, its letter was redriven elsewhere
-- include: start
return record_start(retries, start, kept)
