-- Purpose: renew the leases of messages that a live worker holds.
-- KEYS: 1 unacked_index (zset)  2 leases (zset)
-- ARGV: 1 lease (seconds)
--       2... tags (at most 500)
-- Returns: the tags that have no lease any more: acknowledged, or given to others
-- Complexity: O(number of tags)
local time = redis.call('TIME')
local now, gone = time[1] + time[2] / 1000000, {}
for i = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[2], ARGV[i]) then
    redis.call('ZADD', KEYS[2], 'XX', now + tonumber(ARGV[1]), ARGV[i])
    redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
