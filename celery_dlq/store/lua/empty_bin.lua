-- Purpose: delete overdue letters from the bin.
-- KEYS: 1 bin (stream)  2 binned (hash)
-- ARGV: 1 keep (milliseconds in the bin)
--       2 most (maximum number of letters to delete)
-- Returns: the number of letters deleted
-- Complexity: O(M), M deleted
local overdue = string.format('%.0f', redis.call('TIME')[1] * 1000 - tonumber(ARGV[1]))
local old = redis.call('XRANGE', KEYS[1], '-', overdue, 'COUNT', ARGV[2])
for _, entry in ipairs(old) do
  redis.call('HDEL', KEYS[2], entry[2][2])  -- the value of the first field, ~key
  redis.call('XDEL', KEYS[1], entry[1])
end
return #old
