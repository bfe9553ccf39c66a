-- Purpose: add a note to a group, and remove what is known of groups that had no letters for long.
-- KEYS: 1 notes (hash)  2 noted (zset)  3 groups (zset)  4 states (hash)
-- ARGV: 1 fingerprint
--       2 note (JSON text of one line)
--       3 most (maximum number of notes on a group; the oldest go)
--       4 keep (milliseconds for which notes are kept without letters)
-- Returns: the number of notes on the group
-- Complexity: O(number of its notes + M log N), M groups that are overdue (at most 100)
local fingerprint, most, lines = ARGV[1], tonumber(ARGV[3]), {}
-- include: overdue
remove_overdue(fingerprint, ARGV[4])
for line in string.gmatch(redis.call('HGET', KEYS[1], fingerprint) or '', '[^\n]+') do
  lines[#lines + 1] = line
end
if lines[#lines] ~= ARGV[2] then lines[#lines + 1] = ARGV[2] end  -- it may be sent again
local first = math.max(1, #lines - most + 1)
redis.call('HSET', KEYS[1], fingerprint, table.concat(lines, '\n', first))
redis.call('ZADD', KEYS[2], now, fingerprint)
return #lines - first + 1
