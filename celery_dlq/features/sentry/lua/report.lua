-- Purpose: decide whether a letter that is about to be stored is reported.
-- KEYS: 1 report (hash)  2 tally (hash)  3 allowance (hash)  4 states (hash)
-- ARGV: 1 letter id
--       2 fingerprint
--       3 quiet (milliseconds after which a group is new again)
--       4 gap (minimum of milliseconds between two reports that a group came back)
--       5 burst (maximum of reports at once)
--       6 refill (milliseconds until one more is allowed)
--       7 named (maximum of ids in a report)
--       8 redrives (number of times the letter's message was redriven)
--       9 release (of the code that failed, without "," and "|"; empty = unknown)
-- Returns: {state, number, letter ids}: 0 = not, 1 = new, 2 = came back, 3 = grew, 4 = regressed;
--          number of the letter in its group; the newest ids, separated by spaces
-- Complexity: O(1)
local id, time = ARGV[1], redis.call('TIME')
-- include: state
-- include: quiet
-- include: allowance
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PEXPIRE', KEYS[1], ARGV[3])  -- OOM-safe order, see README
local reported_id, reported_state, reported_number, reported_ids, reported_at, owed, newest_ids,
  redrives, reported_end = unpack(redis.call('HMGET', KEYS[1], 'letter', 'state', 'number',
  'named', 'at', 'owed', 'ids', 'redrives', 'ended'))
if reported_id == id then  -- a repetition: the letter could not be stored
  return {tonumber(reported_state), tonumber(reported_number), reported_ids}
end
local group_state = redis.call('HGET', KEYS[4], ARGV[2]) or ''
if is_quiet(group_state, now) then return {0, 0, ''} end
local ended = ended_resolution(group_state, ARGV[9])
local ids = {id}
for other in string.gmatch(newest_ids or '', '%S+') do
  if other == id then return {0, 0, ''} end
  if #ids < tonumber(ARGV[7]) then ids[#ids + 1] = other end
end
local ids_text = table.concat(ids, ' ')
local is_empty = redis.call('HEXISTS', KEYS[2], 'group:' .. ARGV[2]) == 0
local is_redriven = tonumber(ARGV[8]) > tonumber(redrives or '0')
local is_due = reported_at and now - tonumber(reported_at) >= tonumber(ARGV[4])
local number, state = redis.call('HINCRBY', KEYS[1], 'count', 1), tonumber(owed or '0')
if ended and ended ~= reported_end then
  number, state = 1, 4
elseif number == 1 then
  state = is_empty and 1 or 2
elseif (is_empty or is_redriven) and is_due then
  number, state = 1, 2
elseif state == 0 and string.match(tostring(number), '^10+$') then
  state = 3
end
redis.call('HSET', KEYS[1], 'count', number, 'ids', ids_text, 'ended', ended or reported_end or '')
if is_redriven and number == 1 then redis.call('HSET', KEYS[1], 'redrives', ARGV[8]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if state == 0 then return {0, number, ''} end
if not is_allowed(now, tonumber(ARGV[5]), tonumber(ARGV[6])) then
  redis.call('HSET', KEYS[1], 'owed', state)
  return {0, number, ''}
end
redis.call('HDEL', KEYS[1], 'owed')
redis.call('HSET', KEYS[1], 'letter', id, 'state', state, 'number', number, 'named', ids_text,
  'at', now)
return {state, number, ids_text}
