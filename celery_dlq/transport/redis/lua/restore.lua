-- Purpose: return an unacknowledged message to its list.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)  4 restored (zset)
--       5 queue (list)
-- ARGV: 1 tag (of the delivery)
--       2 entry
--       3 first (1: the next that is fetched; 0: the last)
--       4 expired (1: only if its lease has ended; its worker finds the tag in `restored`)
-- Returns: 1, or 0 if it was acknowledged, restored by another, or its lease was renewed
-- Complexity: O(log of the number of unacknowledged messages)
local KEPT_SECONDS = 86400
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
if ARGV[4] == '1' then
  local ends = redis.call('ZSCORE', KEYS[3], ARGV[1])
  if ends and tonumber(ends) > now then return 0 end
end
-- Removes first: a full Redis refuses a script whose first write needs memory.
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call(ARGV[3] == '1' and 'RPUSH' or 'LPUSH', KEYS[5], ARGV[2])
if ARGV[4] == '1' then
  redis.call('ZADD', KEYS[4], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now - KEPT_SECONDS)
end
return 1
