-- Purpose: count the start of a delivery and record it.
-- KEYS: 1 run (hash)  2 workers (zset)  3 late_copies (zset)
-- ARGV: 1 place (of the message among those of its task id)
--       2 limit (max_deliveries; 0 = no limit)
--       3 start (microseconds since 1970, "|", "pid@hostname#token:release")
--       4 ttl (milliseconds, sliding)
--       5 kept (maximum of starts per message; about four times as many fields per task id)
--       6 stale (milliseconds after which a silent worker counts as dead; 0 = do not check)
--       7 waited (milliseconds since this delivery was first postponed; -1 = never)
--       8 known (deliveries that the worker knows of; they count if fewer are on record)
--       9 alone (1 = may be counted though its last delivery vanished; 0 = not now)
--       10 unless_late (1 = not if it died or was retried before; 0 = count in any case)
--       11 here (1 = a delivery of it runs on this very worker; 0 = none does)
--       12 letter id (of the message's letter)  13 again (1 = after a broken connection)
-- Returns: {state, number of this or the last counted delivery, suspect}: 1 = COUNTED, 0 =
--          LIMIT_REACHED, 2 = RUNNING (on a live worker), 3 = UNCERTAIN (its worker may just have
--          died), 4 = SUSPECT (vanished, and alone = 0), 5 = DEAD, 6 = RETRIED
-- Complexity: O(1)
local IN_FLIGHT_MILLIS = 500  -- a worker's last heartbeat may arrive this long after its crash
local MAX_COPIES = 10  -- not counted; then assume that the record of the end was lost
local place, limit, start, kept = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[5])
local stale, waited, known = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
-- include: start
local count, dead, time = 'count:' .. place, ARGV[12], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function is_late(member) return tonumber(redis.call('ZSCORE', KEYS[3], member) or '0') > now end
local last = tonumber(redis.call('HGET', KEYS[1], count) or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[4])  -- OOM-safe order, see README
local last_start = redis.call('HGET', KEYS[1], 'start:' .. place .. ':' .. last)
if ARGV[13] == '1' and last_start == start then return {1, last, 0} end
local open = last > 0 and redis.call('HEXISTS', KEYS[1], 'end:' .. place .. ':' .. last) == 0
-- What started since then is no copy: somebody published the very message once more.
if last == 0 and is_late(dead) then
  if ARGV[10] == '1' then return {5, last, 0} end
  known = redis.call('ZREM', KEYS[3], dead) - 1
elseif not open and ARGV[10] == '1' and is_late('retried:' .. dead) then
  return {6, last, 0}
end
local worker = last_start and string.match(last_start, '|(.*)$') or ''
-- Over, though its end is not on record: the asking worker started it, and does not run it.
if ARGV[11] == '0' and worker == string.match(start, '|(.*)$') then open = false end
if open and stale > 0 then
  local alive_at = tonumber(redis.call('ZSCORE', KEYS[2], worker) or '')
  if alive_at and now - alive_at < stale then
    -- Only a heartbeat that is newer than this delivery proves that the worker lives.
    if waited < 0 or alive_at <= now - waited + IN_FLIGHT_MILLIS then return {3, last, 0} end
    local copies = redis.call('HINCRBY', KEYS[1], 'double:' .. place .. ':' .. last, 1)
    if copies <= MAX_COPIES then return {2, last, 0} end
  end
end
if known > last then
  last = known
  redis.call('HSET', KEYS[1], count, last)
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
if limit > 0 and last >= limit then return {0, last, 0} end
if open and ARGV[9] == '0' then return {4, last, 1} end
last = record_start(place, start, kept)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {1, last, open and 1 or 0}
