-- Purpose: count the start of a message's first delivery; nobody waits for the answer.
-- KEYS: 1 run (hash)
-- ARGV: 1 retries (header of the message)
--       2 start (microseconds since 1970, "|", "pid@hostname#token")
--       3 ttl (milliseconds, sliding)
--       4 kept (most starts kept per retries number, and retries numbers kept)
--       5 again (1 = told once more, because its connection broke)
-- Returns: the number of the delivery
-- Complexity: O(1)
local retries, kept = ARGV[1], tonumber(ARGV[4])
-- First: a full Redis lets no script begin by adding.
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then  -- the rule: nothing is known of it
  redis.call('HSET', KEYS[1], 'count:' .. retries, 1, 'start:' .. retries .. ':1', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 1
end
local last = redis.call('HGET', KEYS[1], 'count:' .. retries) or '0'
local known = redis.call('HGET', KEYS[1], 'start:' .. retries .. ':' .. last)
if ARGV[5] == '1' and known == ARGV[2] then return tonumber(last) end
redis.call('HDEL', KEYS[1], 'dead:' .. retries)  -- its letter was redriven elsewhere, say
local number = redis.call('HINCRBY', KEYS[1], 'count:' .. retries, 1)
redis.call('HSET', KEYS[1], 'start:' .. retries .. ':' .. number, ARGV[2])
local old, gone = retries .. ':' .. (number - kept), tonumber(retries) - kept
redis.call('HDEL', KEYS[1], 'start:' .. old, 'end:' .. old)
for n = 1, (number == 1 and gone >= 0) and kept or 0 do
  redis.call('HDEL', KEYS[1], 'start:' .. gone .. ':' .. n, 'end:' .. gone .. ':' .. n, 'count:' .. gone)
end
return number
