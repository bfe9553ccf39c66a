-- Purpose: give back claims that were not used.
-- KEYS: 1 claims (hash)
-- ARGV: 1 owner
--       2... letter ids (at most 500)
-- Returns: how many were given back
-- Complexity: O(number of ids)
local released = 0
for i = 2, #ARGV do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  local owner = held and string.match(held, '^claimed|(.*)|%d+$')
  if owner == ARGV[1] then
    released = released + redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
return released
