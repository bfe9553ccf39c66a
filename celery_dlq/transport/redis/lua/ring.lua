-- Purpose: wake one worker that waits for a bell.
-- KEYS: 1 unacked (hash)  2 bell (list)
-- ARGV: none
-- Returns: nothing
-- Complexity: O(1)
-- Begins with a removal of nothing, so it works on a full Redis.
redis.call('HDEL', KEYS[1], '')
if redis.call('LLEN', KEYS[2]) == 0 then redis.call('LPUSH', KEYS[2], '1') end
redis.call('PEXPIRE', KEYS[2], 1000)
