-- Purpose: set the state of a group, and remove what is known of groups without letters for long.
-- KEYS: 1 notes (hash)  2 noted (zset)  3 groups (zset)  4 states (hash)
-- ARGV: 1 fingerprint
--       2 state (text, see parts/state.lua; empty = open)
--       3 keep (milliseconds for which a state is kept without letters)
-- Returns: 1
-- Complexity: O(M log N), M groups that are overdue (at most 100)
local fingerprint = ARGV[1]
-- include: overdue
redis.call('HDEL', KEYS[4], '')  -- deletes nothing; OOM-safe order, see README
remove_overdue(fingerprint, ARGV[3])
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[4], fingerprint)
  return 1
end
redis.call('HSET', KEYS[4], fingerprint, ARGV[2])
redis.call('ZADD', KEYS[2], now, fingerprint)
return 1
