-- Purpose: return which of some queues have a letter, or an entry at a position.
-- KEYS: 1... in turn for each queue: ids (hash); letters (stream)
-- ARGV: 1 the id of the letter, or the position
-- Returns: for each queue: 1 if it is there; else 0
-- Complexity: O(queues)
local is_position, found = string.match(ARGV[1], '^%d+%-%d+$'), {}
for ids = 1, #KEYS, 2 do
  local letters, there = ids + 1, redis.call('HEXISTS', KEYS[ids], ARGV[1])
  if is_position then there = #redis.call('XRANGE', KEYS[letters], ARGV[1], ARGV[1]) end
  found[letters / 2] = there
end
return found
