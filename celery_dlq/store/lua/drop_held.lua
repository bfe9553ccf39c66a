-- Purpose: delete the queue of a hold, if it is empty.
-- KEYS: 1 letters (stream)
-- ARGV: none
-- Returns: 1 if it is removed, else 0
-- Complexity: O(1)
if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
redis.call('DEL', KEYS[1])
return 1
