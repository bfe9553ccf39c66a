-- Part of dead_letter.lua, ended.lua and died.lua: note that no copy of a message runs any more.
-- KEYS: late_copies, as in those scripts; it is given
local MINUTE_MILLIS, MAX_OVERDUE = 60000, 100
-- `cleans`: it removes what is overdue, and keeps the key for the notes of the next minute.
local function note_late_copy(key, member, now, keep, ttl, cleans)
  redis.call('ZADD', key, now + keep, member)
  if not cleans and redis.call('ZCARD', key) > 1 then return end  -- a new key has no expiry
  redis.call('PEXPIRE', key, ttl + MINUTE_MILLIS)
  now = redis.call('TIME')[1] * 1000  -- entries of a stream go on from a clock that was ahead
  local overdue = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MAX_OVERDUE)
  if #overdue > 0 then redis.call('ZREM', key, unpack(overdue)) end
end
