-- Purpose: read entries of a stream until they are many, or their bytes are.
-- KEYS: 1 letters (stream), or another stream of entries
-- ARGV: 1 the end to begin at (as for XRANGE or XREVRANGE)
--       2 the other end
--       3 newest (1 = newest first, 0 = oldest first)
--       4 most entries
--       5 most bytes: the entry that reaches them is the last one
-- Returns: {1 if there may be more entries, else 0; the entries as XRANGE returns them}
-- Complexity: O(number of entries), some microseconds each
-- Entries are read one by one: their sizes are known only then.
local read = ARGV[3] == '1' and 'XREVRANGE' or 'XRANGE'
local from, most, room, found = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5]), {}
while #found < most and room > 0 do
  local entry = redis.call(read, KEYS[1], from, ARGV[2], 'COUNT', 1)[1]
  if not entry then return {0, found} end
  found[#found + 1] = entry
  for _, part in ipairs(entry[2]) do room = room - #part end
  from = '(' .. entry[1]
end
return {1, found}
