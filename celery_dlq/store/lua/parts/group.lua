-- Part of dead_letter.lua: the value of a group, after one more letter. Its counts are texts:
-- "number of a span of time:letters", newest first, separated by commas. The newest five minutes
-- are not in the hours yet: so most letters change one number.
local SPAN_MILLIS, HOUR_SPANS, MAX_SPANS, MAX_HOURS, MAX_RELEASES = 300000, 12, 12, 24, 5
local function since(counts, oldest)  -- without older ones
  local kept = {}
  for span, letters in string.gmatch(counts, '(%d+):(%d+)') do
    if tonumber(span) >= oldest then kept[#kept + 1] = span .. ':' .. letters end
  end
  return kept
end
local function with_hour(hours, span, letters)
  local hour = math.floor(span / HOUR_SPANS)
  local known, others = string.match(hours, '^' .. hour .. ':(%d+)(.*)$')
  if known then return hour .. ':' .. known + letters .. others end
  local kept = since(hours, hour - MAX_HOURS + 1)
  table.insert(kept, 1, hour .. ':' .. letters)
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
local function grown(group, at, id, stored, release, facts)  -- also returns when it was last seen
  local number = math.floor(stored / SPAN_MILLIS)
  local span = string.format('%.0f', number)
  local first, last, hours, newest, letters, recent, releases = string.match(
    group or '', '^([^|]*)|([^|]*)|[^|]*|([^|]*)|(%d+):(%d+)([^|]*)|([^|]*)|')
  if not first then
    return at .. '|' .. at .. '|' .. id .. '||' .. span .. ':1|' .. release .. '|' .. facts
  end
  if newest ~= span then
    hours = with_hour(hours, tonumber(newest), letters)
    recent = table.concat(since(newest .. ':' .. letters .. recent, number - MAX_SPANS + 1), ',')
    recent, letters = recent ~= '' and ',' .. recent or '', 0
  end
  if releases ~= release then releases = with_release(releases, release) end
  return first .. '|' .. at .. '|' .. id .. '|' .. hours .. '|' .. span .. ':' .. letters + 1
    .. recent .. '|' .. releases .. '|' .. facts, last
end
