-- Purpose: count the start of a message's first delivery; the worker does not wait.
-- KEYS: 1 run (hash)
-- ARGV: 1 place (of the message among those of its task id)
--       2 start (microseconds since 1970, "|", "pid@hostname#token:release")
--       3 ttl (milliseconds, sliding)
--       4 kept (maximum of starts per message; about four times as many fields per task id)
-- Returns: the number of the delivery
-- Complexity: O(1)
local place, start, kept = ARGV[1], ARGV[2], tonumber(ARGV[4])
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then  -- OOM-safe order, see README
  -- The usual case: nothing is recorded yet.
  redis.call('HSET', KEYS[1], 'count:' .. place, 1, 'start:' .. place .. ':1', start)
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 1
end
-- include: start
return record_start(place, start, kept)
