-- Purpose: count the start of a message's first delivery; the worker does not wait.
-- KEYS: 1 run (hash)
-- ARGV: 1 retries (header of the message)
--       2 start (microseconds since 1970, "|", "pid@hostname#token")
--       3 ttl (milliseconds, sliding)
--       4 kept (maximum of starts per retries number, and of retries numbers)
--       5 again (1 = a repetition after a broken connection)
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
local last = redis.call('HGET', KEYS[1], count) or '0'
local last_start = redis.call('HGET', KEYS[1], 'start:' .. retries .. ':' .. last)
if ARGV[5] == '1' and last_start == start then return tonumber(last) end
redis.call('HDEL', KEYS[1], 'dead:' .. retries)  -- for example, its letter was redriven elsewhere
local number = redis.call('HINCRBY', KEYS[1], count, 1)
redis.call('HSET', KEYS[1], 'start:' .. retries .. ':' .. number, start)
-- Bounded, as in count.lua.
local oldest, old_retries = retries .. ':' .. (number - kept), tonumber(retries) - kept
redis.call('HDEL', KEYS[1], 'start:' .. oldest, 'end:' .. oldest)
for n = 1, (number == 1 and old_retries >= 0) and kept or 0 do
  local place = old_retries .. ':' .. n
  redis.call('HDEL', KEYS[1], 'start:' .. place, 'end:' .. place, 'count:' .. old_retries)
end
return number
