-- Purpose: wake one worker that waits for a bell; whoever gives the duty up wakes another so.
-- KEYS: 1 unacked (hash)  2 bell (list)  3 duty (string)
-- ARGV: 1 worker (that is no longer on duty; empty = none)
-- Returns: nothing
-- Complexity: O(1)
-- Begins with a removal of nothing, so it works on a full Redis.
redis.call('HDEL', KEYS[1], '')
if ARGV[1] ~= '' and redis.call('GET', KEYS[3]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
if redis.call('LLEN', KEYS[2]) == 0 then redis.call('LPUSH', KEYS[2], '1') end
redis.call('PEXPIRE', KEYS[2], 1000)
