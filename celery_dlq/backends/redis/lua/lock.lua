-- Purpose: keep a lock, or let go of it, if it is still ours.
-- KEYS: 1 lock (string)
-- ARGV: 1 owner
--       2 span (milliseconds; 0 = let go)
-- Returns: 1 if it was ours, else 0
-- Complexity: O(1)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
