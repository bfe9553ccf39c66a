-- Part of report.lua: take one report from the allowance of the dead-letter queue, if there is one.
-- KEYS: 3 allowance, as in that script
local function is_allowed(now, burst, refill)
  local left, at = unpack(redis.call('HMGET', KEYS[3], 'left', 'at'))
  left = math.min(burst, tonumber(left or burst) + (now - tonumber(at or now)) / refill)
  if left < 1 then return false end
  redis.call('HSET', KEYS[3], 'left', tostring(left - 1), 'at', now)
  redis.call('PEXPIRE', KEYS[3], math.ceil(burst * refill))
  return true
end
