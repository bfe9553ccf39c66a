-- Part of dead_letter.lua, ended.lua and died.lua: note that no copy of a message runs any more.
-- KEYS: late_copies, as in those scripts; its number is given
local MAX_OVERDUE = 10  -- so notes go faster than they come
local function note_late_copy(notes, keep, member)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZADD', KEYS[notes], now + keep, member)
  local overdue = redis.call('ZRANGEBYSCORE', KEYS[notes], '-inf', now, 'LIMIT', 0, MAX_OVERDUE)
  for _, other in ipairs(overdue) do redis.call('ZREM', KEYS[notes], other) end
end
