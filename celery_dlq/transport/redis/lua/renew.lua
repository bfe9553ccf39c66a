-- Purpose: renew the leases of messages that a live worker holds.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)  4 restored (zset)
-- ARGV: 1 lease (seconds)
--       2... tags (at most 500)
-- Returns: two lists of tags: of messages that were given to others, and of those that are
--          acknowledged or unknown: Redis may have lost data
-- Complexity: O(number of tags)
-- Begins with a removal of nothing, so it works on a full Redis: else live workers would lose
-- their messages.
redis.call('ZREM', KEYS[3], '')
local time = redis.call('TIME')
local now, given, unknown = time[1] + time[2] / 1000000, {}, {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('ZADD', KEYS[3], now + tonumber(ARGV[1]), ARGV[i])
    redis.call('ZADD', KEYS[2], now, ARGV[i])
  elseif redis.call('ZSCORE', KEYS[4], ARGV[i]) then
    given[#given + 1] = ARGV[i]
  else
    unknown[#unknown + 1] = ARGV[i]
  end
end
return {given, unknown}
