-- Purpose: record how a delivery ended (and that it began), or take its count back.
-- KEYS: 1 run (hash)  2 late_copies (zset)
-- ARGV: 1 place (of the message among those of its task id)
--       2 number (of the delivery, as its worker knows it)
--       3 end (JSON text; empty = it has not ended, or never started: keep no record)
--       4 ttl (milliseconds, sliding)
--       5 charged (2 = it counts, also if its start could not be recorded; 1 = it counts if its
--         start is on record; 0 = it no longer counts)
--       6 start (as recorded when it was counted; identifies the delivery)
--       7 letter id (that the message's letter would have)
--       8 retried (milliseconds for which late copies are recognised of a message that was retried;
--         0 = it was not)
-- Returns: 1 if it is recorded, else 0 (no such start: nothing is changed)
-- Complexity: O(number of deliveries kept)
local MAX_NUMBERS_BACK, MAX_ASIDE = 50, 20
local place, start = ARGV[1], ARGV[6]
-- include: start
-- include: late_copy
local last = tonumber(redis.call('HGET', KEYS[1], 'count:' .. place) or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])  -- OOM-safe order, see README
if ARGV[8] ~= '0' then
  note_late_copy(KEYS[2], 'retried:' .. ARGV[7], ARGV[8], ARGV[4])
end
local function is_ours(n)
  return redis.call('HGET', KEYS[1], 'start:' .. place .. ':' .. n) == start
end
local number = is_ours(ARGV[2]) and tonumber(ARGV[2])
-- If a copy of the message was counted meanwhile, this delivery may have another number.
for n = last, math.max(1, last - MAX_NUMBERS_BACK), -1 do
  if number then break end
  if is_ours(n) then number = n end
end
if not number then
  if ARGV[5] ~= '2' or (last == 0 and redis.call('ZSCORE', KEYS[2], ARGV[7])) then return 0 end
  number = record_start(place, start, MAX_NUMBERS_BACK)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
local own = place .. ':' .. number
if ARGV[5] ~= '0' then
  if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'end:' .. own, ARGV[3]) end
  return 1
end
redis.call('HDEL', KEYS[1], 'start:' .. own, 'end:' .. own)
redis.call('HINCRBY', KEYS[1], 'count:' .. place, -1)
if number < last then  -- the last delivery takes the freed number
  for _, what in ipairs({'start:', 'end:'}) do
    local moved = redis.call('HGET', KEYS[1], what .. place .. ':' .. last)
    if moved then redis.call('HSET', KEYS[1], what .. own, moved) end
    redis.call('HDEL', KEYS[1], what .. place .. ':' .. last)
  end
end
if ARGV[3] ~= '' then  -- its number will be assigned again, so its record moves aside
  local aside = redis.call('HINCRBY', KEYS[1], 'interrupted', 1)
  redis.call('HSET', KEYS[1], 'aside:' .. place .. ':' .. (aside % MAX_ASIDE), ARGV[3])
end
return 1
