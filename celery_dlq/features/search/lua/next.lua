-- Purpose: find the next letter of a cause before or after a letter, without sending any to look at.
-- KEYS: 1 letters (stream)
-- ARGV: 1 the position of the letter
--       2 older (1 = before it, 0 = after it)
--       3 the fingerprint
--       4 most entries to look at
--       5 most bytes to look at: the entry that reaches them is the last one
-- Returns: the id of the next letter; 1 if it is further away; 0 if there is none
-- Complexity: O(number of entries), some microseconds each
local older = ARGV[2] == '1'
local read, last = older and 'XREVRANGE' or 'XRANGE', older and '-' or '+'
local from, left, room = '(' .. ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
while left > 0 and room > 0 do
  local entry = redis.call(read, KEYS[1], from, last, 'COUNT', 1)[1]
  if not entry then return 0 end
  local parts, id, cause = entry[2], nil, nil
  for at = 1, #parts, 2 do
    if parts[at] == 'id' then id = parts[at + 1] end
    if parts[at] == 'fingerprint' then cause = parts[at + 1] end
    room = room - #parts[at + 1]
  end
  if id and id ~= '' and cause == ARGV[3] then return id end
  left, from = left - 1, '(' .. entry[1]
end
return 1
