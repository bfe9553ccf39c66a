-- Part of count.lua, count_first.lua and ended.lua: count and record a start; returns its number.
-- KEYS: 1 run, as in those scripts
local function record_start(retries, start, kept)
  local count = 'count:' .. retries
  local number = redis.call('HINCRBY', KEYS[1], count, 1)
  redis.call('HSET', KEYS[1], 'start:' .. retries .. ':' .. number, start)
  -- Bounded: drop the oldest start of this retry; with a new retry, all starts of the oldest.
  local oldest, old_retries = retries .. ':' .. (number - kept), tonumber(retries) - kept
  redis.call('HDEL', KEYS[1], 'start:' .. oldest, 'end:' .. oldest)
  for n = 1, (number == 1 and old_retries >= 0) and kept or 0 do
    local place = old_retries .. ':' .. n
    redis.call('HDEL', KEYS[1], 'start:' .. place, 'end:' .. place, 'count:' .. old_retries)
  end
  return number
end
