-- Purpose: put the edited copy of a held message in its place, as the newest of its hold.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)
-- ARGV: 1 id
--       2 owner (of the claim)
--       3... names and values of the new entry, in turn
-- Returns: 1 = the copy is there instead, 0 = the owner has no claim, or the message is gone
-- Complexity: O(number of fields)
local id, claim = ARGV[1], redis.call('HGET', KEYS[4], ARGV[1])
-- include: entry
local old = redis.call('HGET', KEYS[2], id)
if not old or not claim or string.match(claim, '^%a+|(.*)|%d+$') ~= ARGV[2] then return 0 end
local entry = add_entry(3, ARGV, 3)  -- OOM-safe order, see README
redis.call('HSET', KEYS[2], id, entry)
redis.call('XDEL', KEYS[1], old)
return 1
