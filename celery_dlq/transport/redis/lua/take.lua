-- Purpose: take one entry out of its list, and record it as unacknowledged.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)  4 queue (list)
-- ARGV: 1 tag (of the delivery)
--       2 lease (seconds)
--       3 entry
--       4 queue (name as JSON text)
-- Returns: 1, or 0 if a worker was faster
-- Complexity: O(length of the list)
-- Begins with a removal, so it works on a full Redis: all later commands of the script are allowed.
if redis.call('LREM', KEYS[4], -1, ARGV[3]) == 0 then return 0 end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[3], now + tonumber(ARGV[2]), ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], '[' .. ARGV[3] .. ',"",' .. ARGV[4] .. ']')
return 1
