-- Purpose: find messages whose worker did not renew their lease; one worker looks at a time.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)  4 look (string)
-- ARGV: 1 most (tags to look at)
--       2 pause (milliseconds in which no other worker begins to look; 0 = this one goes on)
-- Returns: the tags of such messages, the newest first: so the oldest is restored last, and is
--       the next that is fetched
-- Complexity: O(most)
-- Begins with a removal of nothing, so it works on a full Redis.
redis.call('ZREM', KEYS[3], '')
if ARGV[2] ~= '0' and not redis.call('SET', KEYS[4], '1', 'NX', 'PX', ARGV[2]) then return {} end
local time = redis.call('TIME')
local now, held = time[1] + time[2] / 1000000, {}
for _, tag in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[3], now, '-inf', 'LIMIT', 0, ARGV[1])) do
  if redis.call('HEXISTS', KEYS[1], tag) == 1 then
    held[#held + 1] = tag
  else  -- acknowledged; its worker died before it could remove this
    redis.call('ZREM', KEYS[3], tag)
    redis.call('ZREM', KEYS[2], tag)
  end
end
return held
