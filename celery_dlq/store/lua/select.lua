-- Purpose: read the letters of a range that match, without the values that nobody wants.
-- KEYS: 1 letters (stream)
-- ARGV: 1 the position to begin at (as for XRANGE)
--       2 the last position
--       3 most entries to look at
--       4 most bytes to look at: the entry that reaches them is the last one
--       5 codes of the wanted fields, one character each (letters/packing.py; empty = all)
--       6 since (microseconds since 1970; empty = any time)  7 until (the same, exclusive)
--       8 reason (empty = any)
--       9... beginnings of fingerprints, one of which matches (none = any)
-- Returns: {1 if there may be more entries, else 0; the letters as XRANGE returns them, an unwanted
--          value empty and an unwanted place 0:0; the last position looked at, if any was}
-- Complexity: O(number of entries)
local since, till, plans = tonumber(ARGV[6]), tonumber(ARGV[7]), {}
local function plan_of(head)  -- what to write for plain values and `-`, and for those in `+`
  local lists, plan, late = {}, {plain = {}, joined = {}}, {}
  for codes in string.gmatch(head .. '.', '([^.]*)%.') do lists[#lists + 1] = codes end
  for number, into in ipairs({plan.plain, plan.joined, plan.joined, late}) do
    for code in string.gmatch(lists[number] or '', '.') do
      into[#into + 1] = not string.find(ARGV[5], code, 1, true) and (number == 3 and '0:0' or '')
    end
  end
  local blank = late[1]
  for _, one in ipairs(late) do blank = blank and one end
  plan.plain[#plan.plain + 1] = blank  -- nil: there is no `-`
  return plan
end
local function thin(parts)
  local head = string.match(parts[2], '^[^\30]*')
  local plan, values = plans[head] or plan_of(head), {}
  plans[head] = plan
  if #plan.plain * 2 + 2 ~= #parts then return end
  for value in string.gmatch(parts[2] .. '\30', '([^\30]*)\30') do
    values[#values + 1] = plan.joined[#values] or value
  end
  parts[2] = table.concat(values, '\30')
  for at, blank in ipairs(plan.plain) do parts[2 * at + 2] = blank or parts[2 * at + 2] end
end
local function matches(parts)
  local value = {}
  for at = 1, #parts, 2 do value[parts[at]] = parts[at + 1] end
  local died, cause = tonumber(value.dead_lettered_at), value.fingerprint
  if died and ((since and died < since) or (till and died >= till)) then return false end
  if ARGV[8] ~= '' and value.reason and value.reason ~= ARGV[8] then return false end
  local found = #ARGV < 9 or not cause
  for at = 9, #ARGV do found = found or string.sub(cause, 1, #ARGV[at]) == ARGV[at] end
  return found
end
local from, left, room, found, last = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), {}
while left > 0 and room > 0 do
  local entry = redis.call('XRANGE', KEYS[1], from, ARGV[2], 'COUNT', 1)[1]
  if not entry then return {0, found, last} end
  left, last, from = left - 1, entry[1], '(' .. entry[1]
  for _, part in ipairs(entry[2]) do room = room - #part end
  if matches(entry[2]) then
    found[#found + 1] = entry
    if ARGV[5] ~= '' and entry[2][1] == '+' then thin(entry[2]) end
  end
end
return {1, found, last}
