-- Purpose: set the state or the owner of a group; forget groups without letters for long.
-- KEYS: 1 notes (hash)  2 noted (zset)  3 groups (zset)  4 states (hash)
-- ARGV: 1 fingerprint
--       2 value (a state, see parts/state.lua, empty = open; or an owner, empty = nobody)
--       3 keep (milliseconds for which it is kept without letters)
--       4 kind (what the value is: empty = a state; "owner:" = an owner)
-- Returns: 1
-- Complexity: O(M log N), M groups that are overdue (at most 100)
local fingerprint, field = ARGV[1], ARGV[4] .. ARGV[1]
-- include: overdue
redis.call('HDEL', KEYS[4], '')  -- deletes nothing; OOM-safe order, see README
remove_overdue(fingerprint, ARGV[3])
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[4], field)
  return 1
end
redis.call('HSET', KEYS[4], field, ARGV[2])
redis.call('ZADD', KEYS[2], now, fingerprint)
return 1
