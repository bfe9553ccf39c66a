-- Purpose: add a demand of an operator, and count up the revision by which workers notice.
-- KEYS: 1 demands (hash)  2 overrides (hash)
-- ARGV: 1 task id
--       2 demand (JSON text)
--       3 most (number of demands)
-- Returns: 1 = ADDED, 0 = FULL
-- Complexity: O(1)
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], 'revision', 1)
return 1
