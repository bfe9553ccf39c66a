-- Purpose: store a letter, index and tally it, and delete the message's counters.
-- KEYS: 1 letters (stream)  2 arrivals (hash)  3 tally (hash)  4 run (hash)  5 groups (zset)
--       6 ids (hash)  7 ends (zset)  8 newest_groups (zset)  9 states (hash)
--       10 late_copies (zset)
-- ARGV: 1 letter id
--       2 reason
--       3 fingerprint
--       4 dead_lettered_at (microseconds since 1970)
--       5 facts of the group (JSON text: task_name, reason, exception_type)
--       6 place (of the message among those of its task id)
--       7 ttl (milliseconds for which late copies of the message are recognised)
--       8 end (microseconds since 1970 when its message expires; empty = never)
--       9 release (of the code that failed, without "," and "|"; empty = unknown)
--       10 again (1 = a second attempt, for the reply to the first was lost: its reply, too)
--       11... names and values of the letter's entry, in turn
-- Returns: 1 = NEW, 2 = REGRESSED (stored, and its group was resolved), 0 = ALREADY_THERE (only
--          the counters are deleted)
-- Complexity: O(number of fields + log N), N groups
local id, fingerprint, at = ARGV[1], ARGV[3], ARGV[4]
-- include: entry
-- include: arrival
-- include: group
-- include: publication
-- include: late_copy
local function forget(stored)  -- see note_late_copy; a late copy must not run with a fresh count
  note_death(4, ARGV[6], redis.call('HGETALL', KEYS[4]), ARGV[7])
  note_late_copy(KEYS[10], id, ARGV[7], ARGV[7], stored)
end
local there = redis.call('HGET', KEYS[6], id)
if there then
-- include: reply_before
  forget()
  return ARGV[10] == '1' and reply_before(there, id, fingerprint, at) or 0
end
local entry = add_entry(3, ARGV, 11)
redis.call('HSET', KEYS[6], id, entry)
-- An expiry that is past by the clock of Redis is left out, or retention would remove the letter
-- before anybody saw it: the worker's clock is wrong, or the letter waited in a spool.
local stored = tonumber(string.match(entry, '^%d+'))
if ARGV[8] ~= '' and ARGV[8] / 1000 > stored then redis.call('ZADD', KEYS[7], ARGV[8], id) end
local count = redis.call('ZINCRBY', KEYS[5], '1', fingerprint)
local place, total = 'group:' .. fingerprint, 'reason:' .. ARGV[2]
local tally = redis.call('HMGET', KEYS[3], place, total)
local value, last = grown(tally[1], at, id, stored, ARGV[9], ARGV[5])
local before = tonumber(tally[2] or 0)
redis.call('HSET', KEYS[3], place, value, total,
  before and string.format('%.0f', before + 1) or tally[2])  -- a damaged count stops no letter
-- To the second: the letters of a storm do not move their group.
if not last or string.sub(last, 1, -7) ~= string.sub(at, 1, -7) then
  redis.call('ZADD', KEYS[8], at, fingerprint)
end
local state = redis.call('HGET', KEYS[9], fingerprint)
if state then  -- few groups have one; each letter would pay for these functions
-- include: state
  state = regressed(state, at, ARGV[9], id)
  if state then redis.call('HSET', KEYS[9], fingerprint, state) end
end
-- Each tenth letter removes a hundred notes: so they go faster than they come.
forget(not (count_arrival(stored, ARGV[2]) or count % 10 == 1) and stored or nil)
return state and 2 or 1
