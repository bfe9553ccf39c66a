-- Part of dead_letter.lua and report.lua: what a letter means to the state of its group.
-- A state is "state|text|text|text|JSON"; see `states` in keys.py.
local function ended_resolution(state, release)  -- returns when it was made; nil if it goes on
  local fixed_in, seen, resolved_at = string.match(state, '^resolved|([^|]*)|([^|]*)|([^|]*)|')
  if not fixed_in then return nil end
  -- Where the fix has a release, a worker of an earlier one has not been deployed yet.
  local is_earlier = fixed_in ~= '' and release ~= '' and release ~= fixed_in
    and string.find(',' .. seen .. ',', ',' .. release .. ',', 1, true)
  if not is_earlier then return resolved_at end
end
local function regressed(state, at, release, id)  -- returns the new state; nil if it stays
  if not ended_resolution(state, release) then return nil end
  local facts = string.match(state, '^[^|]*|[^|]*|[^|]*|[^|]*|(.*)$')
  return table.concat({'regressed', at, release, id, facts}, '|')
end
