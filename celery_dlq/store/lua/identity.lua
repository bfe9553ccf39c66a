-- Purpose: return the id of this store; the first call makes it.
-- KEYS: 1 identity (string)
-- ARGV: 1 new id (kept if there is none yet)
-- Returns: the id
-- Complexity: O(1)
redis.call('PERSIST', KEYS[1])  -- OOM-safe order, see README
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
