-- Part of dead_letter.lua, ended.lua and died.lua: note that no copy of a message runs any more.
-- KEYS: late_copies, as in those scripts; it is given
local MINUTE_MILLIS, MAX_OVERDUE = 60000, 100
-- With `stored`, the time of a letter's entry, nothing is removed; a new key gets an expiry.
local function note_late_copy(key, member, keep, ttl, stored)
  local now = stored or redis.call('TIME')[1] * 1000
  redis.call('ZADD', key, now + keep, member)
  if stored and redis.call('ZCARD', key) > 1 then return end
  redis.call('PEXPIRE', key, ttl + MINUTE_MILLIS)  -- also for the notes of the next minute
  if stored then return end
  local overdue = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MAX_OVERDUE)
  if #overdue > 0 then redis.call('ZREM', key, unpack(overdue)) end
end
