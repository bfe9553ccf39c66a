-- Purpose: take the next entry of the first list that has one, and record it as unacknowledged;
--          without one, be on duty for the idle workers of these lists, if nobody else is.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)  4 duty (string)  5 bell (list)
--       6... lists, those of the highest priority first (one for each queue and priority)
-- ARGV: 1 tag (of the delivery; its first 32 characters name the worker)
--       2 lease (seconds)
--       3... queues (names as JSON text, in the order of the lists; an empty text: its consumer
--       does not acknowledge, so nothing is recorded)
--       last: one digit (1 = woken, + 2 = it has room for one entry, + 4 = the task leaves nobody
--       to look; + 8 = it cannot be woken), then acknowledged (tags of other deliveries, one a line)
-- Returns: a list: the number of the list from 1, the entry, and 1 if it is on duty and leaves no
--       entry; without an entry 1 = on duty, or 0
-- Complexity: O(number of lists and of acknowledged tags)
-- Begins with a removal or a pop, so it works on a full Redis: all later commands are allowed.
local DUTY_MILLIS, BELL_MILLIS, MOST_WOKEN = 3500, 1000, 4
local BLOCK = 100  -- keys that unpack takes, at most 8,000; with more, EXISTS finds the list
local mode, worker = tonumber(string.sub(ARGV[#ARGV], 1, 1)), string.sub(ARGV[1], 1, 32)
for tag in string.gmatch(string.sub(ARGV[#ARGV], 2), '[^\n]+') do redis.call('HDEL', KEYS[1], tag) end
local woken, queues = mode % 2 == 1, #ARGV - 3
local function skip_empty(i)  -- to the first block from there with an entry, or beyond the last
  local last = math.min(i + BLOCK - 1, #KEYS)
  local found = i > #KEYS or redis.call('EXISTS', unpack(KEYS, i, last)) > 0
  return found and i or skip_empty(last + 1)
end
for i = #KEYS > (woken and 9 or BLOCK) and skip_empty(6) or 6, #KEYS do  -- 4 are one queue's
  local entry = redis.call('RPOP', KEYS[i])
  if entry then
    local queue = ARGV[3 + (i - 6) % queues]
    if queue ~= '' then
      local time = redis.call('TIME')
      local now = time[1] + time[2] / 1000000
      redis.call('ZADD', KEYS[3], now + tonumber(ARGV[2]), ARGV[1])
      redis.call('ZADD', KEYS[2], now, ARGV[1])
      redis.call('HSET', KEYS[1], ARGV[1], '[' .. entry .. ',"",' .. queue .. ']')
    end
    if mode % 8 == 0 then return {i - 5, entry} end
    local more, tokens = skip_empty(i) <= #KEYS, 0
    if more and woken then tokens = math.max(1, math.min(redis.call('LLEN', KEYS[i]), MOST_WOKEN)) end
    local leaves, reply = mode % 8 > 3 or more and mode % 8 > 1, {i - 5, entry}
    local holder = (leaves or not more) and redis.call('GET', KEYS[4])
    if leaves then
      if holder == worker then redis.call('DEL', KEYS[4]) end
      if not holder or holder == worker then tokens = math.max(tokens, 1) end
    elseif not more and mode < 8 and (not holder or holder == worker) then
      if not holder then redis.call('SET', KEYS[4], worker, 'PX', DUTY_MILLIS) end
      reply[3] = 1
    end
    if tokens > 0 and redis.call('LLEN', KEYS[5]) == 0 then  -- else nobody waits for it
      for _ = 1, tokens do redis.call('LPUSH', KEYS[5], '1') end
      redis.call('PEXPIRE', KEYS[5], BELL_MILLIS)
    end
    return reply
  end
end
local holder = redis.call('GET', KEYS[4])
if holder == worker then return redis.call('PEXPIRE', KEYS[4], DUTY_MILLIS) end
if holder or mode > 7 then return 0 end
redis.call('HDEL', KEYS[1], '')  -- for a full Redis
redis.call('SET', KEYS[4], worker, 'PX', DUTY_MILLIS)
return 1
