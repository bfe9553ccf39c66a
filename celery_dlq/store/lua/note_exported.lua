-- Purpose: record up to which entry letters are exported; never moves back.
-- KEYS: 1 exported (string)
-- ARGV: 1 position (entry id of the stream)
-- Returns: 1 if it is recorded, else 0 (it was at least as far)
-- Complexity: O(1)
local function precedes(one, other)  -- as text: ids may exceed the precision of Lua's numbers
  return #one < #other or (#one == #other and one < other)
end
local before = redis.call('GET', KEYS[1])
if before then
  local time, count = string.match(before, '^(%d+)-(%d+)$')
  local new_time, new_count = string.match(ARGV[1], '^(%d+)-(%d+)$')
  local later = precedes(time, new_time) or (time == new_time and precedes(count, new_count))
  if not later then
    return 0
  end
end
redis.call('PERSIST', KEYS[1])  -- OOM-safe order, see README
redis.call('SET', KEYS[1], ARGV[1])
return 1
