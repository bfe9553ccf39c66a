-- Purpose: count the start of a delivery and remember it.
-- KEYS: 1 run (hash)  2 workers (zset)
-- ARGV: 1 retries (header of the message)
--       2 limit (most deliveries; 0 = no limit)
--       3 start (microseconds since 1970, "|", "pid@hostname#token")
--       4 ttl (milliseconds, sliding)
--       5 kept (most starts kept per retries number, and retries numbers kept)
--       6 stale (milliseconds after which a silent worker is dead; 0 = do not look)
--       7 waited (milliseconds since this delivery was first put off; -1 = never)
--       8 uncounted (deliveries that could not be counted before, and are now)
--       9 alone (1 = may be counted though its last delivery vanished; 0 = not now)
--       10 unless_dead (1 = not if its letter was stored; 0 = it is a new message)
--       11 again (1 = asked once more, because its connection broke)
-- Returns: {state, number, suspect}: 1 = COUNTED, 0 = LIMIT_REACHED, 2 = RUNNING (on a live
--          worker), 3 = UNCERTAIN (its worker may just have died), 4 = SUSPECT (vanished; not
--          now), 5 = DEAD; only COUNTED counts; number of this or the last counted delivery
-- Complexity: O(1)
local retries, stale, waited = ARGV[1], tonumber(ARGV[6]), tonumber(ARGV[7])
local count, limit, kept = 'count:' .. retries, tonumber(ARGV[2]), tonumber(ARGV[5])
local last = tonumber(redis.call('HGET', KEYS[1], count) or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])  -- first: a full Redis lets no script begin by adding
local known = redis.call('HGET', KEYS[1], 'start:' .. retries .. ':' .. last)
if ARGV[11] == '1' and known == ARGV[3] then return {1, last, 0} end
if redis.call('HEXISTS', KEYS[1], 'dead:' .. retries) == 1 then
  if ARGV[10] == '1' then return {5, last, 0} end
  redis.call('HDEL', KEYS[1], 'dead:' .. retries)
end
local open = last > 0 and redis.call('HEXISTS', KEYS[1], 'end:' .. retries .. ':' .. last) == 0
if open and stale > 0 then
  local start = redis.call('HGET', KEYS[1], 'start:' .. retries .. ':' .. last)
  local alive = redis.call('ZSCORE', KEYS[2], start and string.match(start, '|(.*)$') or '')
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if alive and now - tonumber(alive) < stale then
    -- A heartbeat that is newer than this delivery tells; one in flight at a crash does not.
    if waited < 0 or tonumber(alive) <= now - waited + 500 then return {3, last, 0} end
    -- Bounded: should the note of its end be lost, its copies are counted in the end.
    if redis.call('HINCRBY', KEYS[1], 'double:' .. retries .. ':' .. last, 1) <= 10 then
      return {2, last, 0}
    end
  end
end
if tonumber(ARGV[8]) > 0 then last = redis.call('HINCRBY', KEYS[1], count, ARGV[8]) end
if limit > 0 and last >= limit then return {0, last, 0} end
if open and ARGV[9] == '0' then return {4, last, 1} end
local number = redis.call('HINCRBY', KEYS[1], count, 1)
redis.call('HSET', KEYS[1], 'start:' .. retries .. ':' .. number, ARGV[3])
local old, gone = retries .. ':' .. (number - kept), tonumber(retries) - kept
redis.call('HDEL', KEYS[1], 'start:' .. old, 'end:' .. old)
for n = 1, (number == 1 and gone >= 0) and kept or 0 do
  redis.call('HDEL', KEYS[1], 'start:' .. gone .. ':' .. n, 'end:' .. gone .. ':' .. n, 'count:' .. gone)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {1, number, open and 1 or 0}
