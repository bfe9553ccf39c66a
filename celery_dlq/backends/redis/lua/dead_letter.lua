-- Purpose: store a letter, index and tally it, and forget the message's counters.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 run (hash)  5 ends (zset)
-- ARGV: 1 letter id
--       2 reason
--       3 fingerprint
--       4 dead_lettered_at (microseconds since 1970)
--       5 facts of the group (JSON text: task_name, reason, exception_type)
--       6 retries (header of the message)
--       7 ttl (milliseconds for which copies of the message are known to be dead)
--       8 end (microseconds since 1970 when its message would have expired; empty = never)
--       9... names and values of the letter's fields, in turn
-- Returns: 1 = STORED, 0 = ALREADY_THERE (only the counters are forgotten)
-- Complexity: O(number of fields)
local id, fingerprint, at = ARGV[1], ARGV[3], ARGV[4]
local function forget()
  redis.call('DEL', KEYS[4])
  -- A copy of the message that is still on its way must not run with a fresh count.
  redis.call('HSET', KEYS[4], 'dead:' .. ARGV[6], 1)
  redis.call('PEXPIRE', KEYS[4], ARGV[7])
end
if redis.call('HEXISTS', KEYS[2], id) == 1 then
  forget()
  return 0
end
local entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 9))
redis.call('HSET', KEYS[2], id, entry)
if ARGV[8] ~= '' then redis.call('ZADD', KEYS[5], ARGV[8], id) end
redis.call('HINCRBY', KEYS[3], 'reason:' .. ARGV[2], 1)
redis.call('HINCRBY', KEYS[3], 'count:' .. fingerprint, 1)
redis.call('HSETNX', KEYS[3], 'first:' .. fingerprint, at)
redis.call('HSET', KEYS[3],
  'last:' .. fingerprint, at,
  'example:' .. fingerprint, id,
  'facts:' .. fingerprint, ARGV[5])
forget()
return 1
