-- Purpose: renew the leases of messages that a live worker holds.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)
-- ARGV: 1 lease (seconds)
--       2... tags (at most 500)
-- Returns: the tags of messages that are not there: acknowledged, or given to others
-- Complexity: O(number of tags)
-- Begins with a removal of nothing, so it works on a full Redis: else live workers would lose
-- their messages.
redis.call('ZREM', KEYS[3], '')
local time = redis.call('TIME')
local now, gone = time[1] + time[2] / 1000000, {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('ZADD', KEYS[3], now + tonumber(ARGV[1]), ARGV[i])
    redis.call('ZADD', KEYS[2], now, ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
