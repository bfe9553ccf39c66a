-- Purpose: record how a delivery ended, unless the message is already forgotten.
-- KEYS: 1 run (hash)
-- ARGV: 1 retries (header of the message)
--       2 number (of the delivery, as far as its worker knows)
--       3 end (JSON text)
--       4 ttl (milliseconds, sliding)
--       5 charged (1 = it counts, 0 = it no longer counts)
--       6 start (as count.lua noted it; tells the true number)
-- Returns: 1 = RECORDED, 0 = FORGOTTEN
-- Complexity: O(1)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])  -- first: a full Redis lets no script begin by adding
local number = ARGV[2]
if redis.call('HGET', KEYS[1], 'start:' .. ARGV[1] .. ':' .. number) ~= ARGV[6] then
  -- A copy of the message was counted meanwhile, so this delivery got another number.
  local last = tonumber(redis.call('HGET', KEYS[1], 'count:' .. ARGV[1]) or '0')
  for n = last, math.max(1, last - 50), -1 do
    if redis.call('HGET', KEYS[1], 'start:' .. ARGV[1] .. ':' .. n) == ARGV[6] then
      number = n
      break
    end
  end
end
local place = ARGV[1] .. ':' .. number
if redis.call('HEXISTS', KEYS[1], 'start:' .. place) == 0 then
  return 0
end
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'end:' .. place, ARGV[3])
else
  redis.call('HDEL', KEYS[1], 'start:' .. place)
  -- The number is given out again, so what is kept of this delivery moves aside.
  redis.call('HINCRBY', KEYS[1], 'count:' .. ARGV[1], -1)
  local aside = redis.call('HINCRBY', KEYS[1], 'interrupted', 1)
  redis.call('HSET', KEYS[1], 'aside:' .. (aside % 20), ARGV[3])
end
return 1
