-- Part of dead_letter.lua: count a letter in the minute of its arrival, by reason.
-- KEYS: 2 arrivals, as in that script
local ARRIVALS_EXPIRE_MILLIS = 3720000  -- an hour and two minutes
local MINUTE_MILLIS = 60000
local function count_arrival(stored, reason)  -- returns true if it is the first in its minute
  local minute = math.floor(stored / MINUTE_MILLIS)
  local place = minute % 60 .. ':' .. reason
  local slot = redis.call('HGET', KEYS[2], place)
  local seen = slot and string.match(slot, '^' .. minute .. ':(%d+)$') or 0
  redis.call('HSET', KEYS[2], place, minute .. ':' .. seen + 1)
  if seen == 0 then redis.call('PEXPIRE', KEYS[2], ARRIVALS_EXPIRE_MILLIS) end
  return seen == 0
end
