-- Purpose: set or lift overrides, and count up the revision by which workers notice.
-- KEYS: 1 overrides (hash)
-- ARGV: 1 value (JSON text; empty = lift)
--       2... fields
-- Returns: the number of fields added or removed
-- Complexity: O(number of fields)
local changed = 0
for i = 2, #ARGV do
  if ARGV[1] == '' then
    changed = changed + redis.call('HDEL', KEYS[1], ARGV[i])
  else
    changed = changed + redis.call('HSET', KEYS[1], ARGV[i], ARGV[1])
  end
end
redis.call('HINCRBY', KEYS[1], 'revision', 1)
return changed
