-- Part of count.lua, count_first.lua and ended.lua: count and record a start; returns its number.
-- KEYS: 1 run, as in those scripts
local function drop_oldest(place, kept)  -- of the messages of this task id
  local fields, flat, started, places = {}, redis.call('HGETALL', KEYS[1]), {}, {}
  for n = 1, #flat, 2 do
    local what, where = string.match(flat[n], '^(%a+):([^:]+)')
    if what == 'start' and where ~= place then
      if not started[where] then places[#places + 1], started[where] = where, 0 end
      started[where] = math.max(started[where], tonumber(string.match(flat[n + 1], '^%d+') or 0))
    end
    if where then fields[where] = fields[where] or {}; table.insert(fields[where], flat[n]) end
  end
  table.sort(places, function(one, other) return started[one] > started[other] end)
  for n = kept, #places do redis.call('HDEL', KEYS[1], unpack(fields[places[n]])) end
end
local function record_start(place, start, kept)
  local number = redis.call('HINCRBY', KEYS[1], 'count:' .. place, 1)
  redis.call('HSET', KEYS[1], 'start:' .. place .. ':' .. number, start)
  -- Bounded: drop the oldest start of this message; with a new one, the oldest messages.
  local oldest = place .. ':' .. (number - kept)
  redis.call('HDEL', KEYS[1], 'start:' .. oldest, 'end:' .. oldest)
  if number == 1 and redis.call('HLEN', KEYS[1]) > 2 * kept then drop_oldest(place, kept) end
  return number
end
