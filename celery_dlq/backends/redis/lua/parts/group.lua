-- Part of dead_letter.lua: the value of a group, after one more letter.
-- Counts are texts: "number of a span of time:letters", newest first, separated by commas.
local HOUR_MILLIS, RECENT_MILLIS = 3600000, 300000
local MAX_HOURS, MAX_RECENT, MAX_RELEASES = 24, 12, 5
local function counted(counts, span, most)
  local letters, others = string.match(counts, '^' .. span .. ':(%d+)(.*)$')
  if letters then return span .. ':' .. letters + 1 .. others end
  local kept = {span .. ':1'}
  for before, number in string.gmatch(counts, '(%d+):(%d+)') do
    if tonumber(before) > span - most then kept[#kept + 1] = before .. ':' .. number end
  end
  return table.concat(kept, ',')
end
local function with_release(releases, release)
  if release == '' or string.match(releases, '^[^,]*') == release then return releases end
  local kept = {release}
  for other in string.gmatch(releases, '[^,]+') do
    if other ~= release then kept[#kept + 1] = other end
  end
  if #kept > MAX_RELEASES then table.remove(kept, MAX_RELEASES) end  -- the first one stays
  return table.concat(kept, ',')
end
local function grown(group, at, id, stored, release, facts)
  local first, hours, recent, releases =
    string.match(group or '', '^([^|]*)|[^|]*|[^|]*|([^|]*)|([^|]*)|([^|]*)|')
  hours = counted(hours or '', math.floor(stored / HOUR_MILLIS), MAX_HOURS)
  recent = counted(recent or '', math.floor(stored / RECENT_MILLIS), MAX_RECENT)
  releases = with_release(releases or '', release)
  return table.concat({first or at, at, id, hours, recent, releases, facts}, '|')
end
