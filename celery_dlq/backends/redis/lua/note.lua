-- Purpose: add a note to a group, and remove the notes on groups that had no letters for long.
-- KEYS: 1 notes (hash)  2 noted (zset)  3 groups (zset)
-- ARGV: 1 fingerprint
--       2 note (JSON text of one line)
--       3 most (maximum number of notes on a group; the oldest go)
--       4 keep (milliseconds for which notes are kept without letters)
-- Returns: the number of notes on the group
-- Complexity: O(number of its notes + M log N), M groups whose notes are overdue (at most 100)
local MAX_OVERDUE = 100
local fingerprint, most, lines = ARGV[1], tonumber(ARGV[3]), {}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local overdue = redis.call(
  'ZRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[4]), 'LIMIT', 0, MAX_OVERDUE)
for _, other in ipairs(overdue) do
  if redis.call('ZSCORE', KEYS[3], other) then
    redis.call('ZADD', KEYS[2], now, other)
  elseif other ~= fingerprint then
    redis.call('HDEL', KEYS[1], other)
    redis.call('ZREM', KEYS[2], other)
  end
end
for line in string.gmatch(redis.call('HGET', KEYS[1], fingerprint) or '', '[^\n]+') do
  lines[#lines + 1] = line
end
if lines[#lines] ~= ARGV[2] then lines[#lines + 1] = ARGV[2] end  -- it may be sent again
local first = math.max(1, #lines - most + 1)
redis.call('HSET', KEYS[1], fingerprint, table.concat(lines, '\n', first))
redis.call('ZADD', KEYS[2], now, fingerprint)
return #lines - first + 1
