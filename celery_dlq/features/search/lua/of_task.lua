-- Purpose: find letters that may name a task among the newest of a queue, without sending their bodies.
-- KEYS: 1 letters (stream)
-- ARGV: 1 the task id
--       2 most entries to look at
--       3 most bytes to look at: the entry that reaches them is the last one
-- Returns: {1 if there may be more entries, else 0; the ids of letters, each followed by what is
--          compressed in it, where the task may be; empty if the rest names it. The newest first}
-- Complexity: O(number of entries), some microseconds each
local from, left, room, found = '+', tonumber(ARGV[2]), tonumber(ARGV[3]), {}
while left > 0 and room > 0 do
  local entry = redis.call('XREVRANGE', KEYS[1], from, '-', 'COUNT', 1)[1]
  if not entry then return {0, found} end
  local parts, id, named, packed = entry[2], nil, false, nil
  for at = 1, #parts, 2 do
    local name, value = parts[at], parts[at + 1]
    room = room - #value
    if name == 'id' then id = value end
    if name == '-' then packed = value end
    named = named or (name ~= 'body' and name ~= '-' and string.find(value, ARGV[1], 1, true))
  end
  if id and (named or packed) then
    found[#found + 1], found[#found + 2] = id, named and '' or packed
  end
  left, from = left - 1, '(' .. entry[1]
end
return {1, found}
