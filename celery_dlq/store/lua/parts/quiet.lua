-- Part of report.lua: whether nobody wants to hear of a group for now.
local quiet = {QUIET_STATES}  -- as `muted = true`: see `GroupState.is_quiet`
local function is_quiet(state, now)  -- in milliseconds since 1970
  local name, quiet_end = string.match(state, '^(%l+)|([^|]*)|')
  return quiet[name] and (quiet_end == '' or tonumber(quiet_end) > now)
end
