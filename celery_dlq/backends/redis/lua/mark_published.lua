-- Purpose: note that the broker confirmed these letters' messages.
-- KEYS: 1 claims (hash)
-- ARGV: 1 owner
--       2 lease (milliseconds)
--       3... letter ids (at most 500)
-- Returns: how many were noted
-- Complexity: O(number of ids)
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])
local claim = 'published|' .. ARGV[1] .. '|' .. string.format('%.0f', till)
for i = 3, #ARGV do
  redis.call('HSET', KEYS[1], ARGV[i], claim)
end
return #ARGV - 2
