-- Purpose: return due entries and postpone them, so that two workers rarely publish one.
-- KEYS: 1 outbox (zset)
-- ARGV: 1 most (maximum number of entries)
--       2 lease (milliseconds until they are due again)
-- Returns: the entries (JSON texts)
-- Complexity: O(M log N), N entries kept, M taken
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PERSIST', KEYS[1])  -- OOM-safe order, see README
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
for _, entry in ipairs(due) do
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), entry)
end
return due
