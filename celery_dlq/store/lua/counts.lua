-- Purpose: return how many letters each of some queues has, and how many came in the last hour.
-- KEYS: 1... in turn for each queue: letters (stream); arrivals (hash)
-- ARGV: none
-- Returns: in turn for each queue: its letters; those of the last hour
-- Complexity: O(queues x minutes with arrivals x reasons)
local MINUTES = 60
local last = math.floor(redis.call('TIME')[1] / 60)
local counts = {}
for letters = 1, #KEYS, 2 do
  local arrivals, hour = letters + 1, 0
  for _, slot in ipairs(redis.call('HVALS', KEYS[arrivals])) do  -- see parts/arrival.lua
    local minute, count = string.match(slot, '^(%d+):(%d+)$')
    if minute and last - minute < MINUTES and last - minute >= 0 then hour = hour + count end
  end
  counts[letters], counts[arrivals] = redis.call('XLEN', KEYS[letters]), hour
end
return counts
