-- Purpose: delete the counts of a message whose letter is in another dead-letter queue, and note that
--          no copy of it runs any more.
-- KEYS: 1 run (hash)  2 late_copies (zset)
-- ARGV: 1 place (of the message among those of its task id)
--       2 letter id (that its letter would have here)
--       3 ttl (milliseconds for which late copies of the message are recognised)
-- Returns: 1
-- Complexity: O(log N + number of deliveries kept), N late copies
local place, id, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- include: publication
-- include: late_copy
note_death(1, place, redis.call('HGETALL', KEYS[1]), ttl)
note_late_copy(KEYS[2], id, ttl, ttl)
return 1
