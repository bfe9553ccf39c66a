-- Part of note.lua and group_state.lua: remove what is known of groups that had no letters for long.
-- KEYS: 1 notes  2 noted  3 groups  4 states, as in those scripts
local MAX_OVERDUE = 100
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function remove_overdue(fingerprint, keep)  -- except of one group
  local overdue = redis.call(
    'ZRANGEBYSCORE', KEYS[2], '-inf', now - keep, 'LIMIT', 0, MAX_OVERDUE)
  for _, other in ipairs(overdue) do
    if redis.call('ZSCORE', KEYS[3], other) then
      redis.call('ZADD', KEYS[2], now, other)
    elseif other ~= fingerprint then
      redis.call('HDEL', KEYS[1], other)
      redis.call('HDEL', KEYS[4], other, 'owner:' .. other)
      redis.call('ZREM', KEYS[2], other)
    end
  end
end
