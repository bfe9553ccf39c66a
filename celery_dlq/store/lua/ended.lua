-- Purpose: record how a delivery ended (and that it began), or take its count back.
-- KEYS: 1 run (hash)
-- ARGV: 1 retries (header of the message)
--       2 number (of the delivery, as its worker knows it)
--       3 end (JSON text; empty = it has not ended, or never started: keep no record)
--       4 ttl (milliseconds, sliding)
--       5 charged (2 = it counts, also if its start could not be recorded; 1 = it counts if its
--         start is on record; 0 = it no longer counts)
--       6 start (as recorded when it was counted; identifies the delivery)
-- Returns: 1 if it is recorded, else 0 (no such start: nothing is changed)
-- Complexity: O(number of deliveries kept)
local MAX_NUMBERS_BACK, MAX_ASIDE = 50, 20
local retries, start = ARGV[1], ARGV[6]
-- include: start
local last = tonumber(redis.call('HGET', KEYS[1], 'count:' .. retries) or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])  -- OOM-safe order, see README
local function is_ours(n)
  return redis.call('HGET', KEYS[1], 'start:' .. retries .. ':' .. n) == start
end
local number = is_ours(ARGV[2]) and tonumber(ARGV[2])
-- If a copy of the message was counted meanwhile, this delivery may have another number.
for n = last, math.max(1, last - MAX_NUMBERS_BACK), -1 do
  if number then break end
  if is_ours(n) then number = n end
end
if not number then
  if ARGV[5] ~= '2' or redis.call('HEXISTS', KEYS[1], 'dead:' .. retries) == 1 then return 0 end
  number = record_start(retries, start, MAX_NUMBERS_BACK)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
local place = retries .. ':' .. number
if ARGV[5] ~= '0' then
  if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'end:' .. place, ARGV[3]) end
  return 1
end
redis.call('HDEL', KEYS[1], 'start:' .. place, 'end:' .. place)
redis.call('HINCRBY', KEYS[1], 'count:' .. retries, -1)
if number < last then  -- the last delivery takes the freed number
  for _, what in ipairs({'start:', 'end:'}) do
    local moved = redis.call('HGET', KEYS[1], what .. retries .. ':' .. last)
    if moved then redis.call('HSET', KEYS[1], what .. place, moved) end
    redis.call('HDEL', KEYS[1], what .. retries .. ':' .. last)
  end
end
if ARGV[3] ~= '' then  -- its number will be assigned again, so its record moves aside
  local aside = redis.call('HINCRBY', KEYS[1], 'interrupted', 1)
  redis.call('HSET', KEYS[1], 'aside:' .. (aside % MAX_ASIDE), ARGV[3])
end
return 1
