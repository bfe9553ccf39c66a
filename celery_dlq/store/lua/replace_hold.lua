-- Purpose: add, change or remove a hold, if nobody has changed it; count up the revision by which
--          workers notice.
-- KEYS: 1 holds (hash)  2 overrides (hash)
-- ARGV: 1 hold id
--       2 the hold that is to be there (text; empty = none)
--       3 the new hold (text, different at each call; empty = remove it)
-- Returns: 1 = REPLACED, also at a second attempt whose first reply was lost; 0 = CHANGED
-- Complexity: O(1)
local there = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if there ~= ARGV[2] then return there ~= '' and there == ARGV[3] and 1 or 0 end
redis.call('PERSIST', KEYS[1])  -- changes nothing; OOM-safe order, see README
redis.call('HINCRBY', KEYS[2], 'revision', 1)
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
