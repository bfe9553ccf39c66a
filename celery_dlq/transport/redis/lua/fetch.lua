-- Purpose: take the next entry of the first list that has one, and record it as unacknowledged.
-- KEYS: 1 unacked (hash)  2 unacked_index (zset)  3 leases (zset)
--       4... lists, those of the highest priority first (one for each queue and priority)
-- ARGV: 1 tag (of the delivery)
--       2 lease (seconds)
--       3... queues (names as JSON text, in the order of the lists; an empty text: its consumer
--       does not acknowledge, so nothing is recorded)
--       last: acknowledged (tags of other deliveries, one a line)
-- Returns: nil, or a list: the number of the list from 1, and the entry
-- Complexity: O(number of lists and of acknowledged tags)
-- Begins with a removal or a pop, so it works on a full Redis: all later commands of the script
-- are allowed.
for tag in string.gmatch(ARGV[#ARGV], '[^\n]+') do redis.call('HDEL', KEYS[1], tag) end
local queues = #ARGV - 3
for i = 4, #KEYS do
  local entry = redis.call('RPOP', KEYS[i])
  if entry then
    local queue = ARGV[3 + (i - 4) % queues]
    if queue ~= '' then
      local time = redis.call('TIME')
      local now = time[1] + time[2] / 1000000
      redis.call('ZADD', KEYS[3], now + tonumber(ARGV[2]), ARGV[1])
      redis.call('ZADD', KEYS[2], now, ARGV[1])
      redis.call('HSET', KEYS[1], ARGV[1], '[' .. entry .. ',"",' .. queue .. ']')
    end
    return {i - 3, entry}
  end
end
