-- Purpose: set the count with which a redriven message begins.
-- KEYS: 1 run (hash)
-- ARGV: 1 ttl (milliseconds)
--       2... names and values of fields, in turn
-- Returns: 1
-- Complexity: O(number of fields)
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
