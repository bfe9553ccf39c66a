-- Part of count.lua, count_first.lua and ended.lua: count and record a start; returns its number.
-- KEYS: 1 run, as in those scripts
local function record_start(place, start, kept)
  local number = redis.call('HINCRBY', KEYS[1], 'count:' .. place, 1)
  redis.call('HSET', KEYS[1], 'start:' .. place .. ':' .. number, start)
  -- Bounded: drop the oldest start of this message; with a new message, the oldest other one.
  local oldest = place .. ':' .. (number - kept)
  redis.call('HDEL', KEYS[1], 'start:' .. oldest, 'end:' .. oldest)
  if number == 1 and redis.call('HLEN', KEYS[1]) > 4 * kept then
    local all, other, at = redis.call('HGETALL', KEYS[1]), nil, start
    for n = 1, #all, 2 do
      local found = string.match(all[n], '^start:([^:]+)')
      if found and found ~= place and all[n + 1] < at then other, at = found, all[n + 1] end
    end
    for n = 1, other and #all or 0, 2 do
      if string.match(all[n], '^%a+:([^:]+)') == other then redis.call('HDEL', KEYS[1], all[n]) end
    end
  end
  return number
end
