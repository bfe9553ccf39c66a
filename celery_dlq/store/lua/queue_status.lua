-- Purpose: return the size and age of a dead-letter queue.
-- KEYS: 1 letters (stream)  2 ends (zset)
-- ARGV: none
-- Returns: {length, entry id of the oldest letter, when it died, when the newest died, the first
--          end, now}; times in microseconds since 1970, empty if there is none
-- Complexity: O(1)
local function died(entry)
  for n = 1, entry and #entry[2] or 0, 2 do
    if entry[2][n] == 'dead_lettered_at' then return entry[2][n + 1] end
  end
  return ''
end
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local time = redis.call('TIME')
local ends = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
return {
  redis.call('XLEN', KEYS[1]), oldest and oldest[1] or '', died(oldest), died(newest),
  ends[2] or '', string.format('%.0f', time[1] * 1000000 + time[2])
}
