-- Purpose: delete the counts of messages that are done; other messages of a task id keep theirs.
-- KEYS: 1... runs (hashes)
-- ARGV: in turn for each run: retries (header of the message); start (of its last delivery);
--       first (1 = that was its first delivery, so earlier counts belong to another message;
--       0 = it was not)
-- Returns: the number of runs deleted
-- Complexity: O(number of runs and of their deliveries)
local gone = 0
for i = 1, #KEYS do
  local retries, start, first = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i] == '1'
  local own, others = nil, false
  if redis.call('HLEN', KEYS[i]) == 2 and redis.call('HGET', KEYS[i], 'start:' .. retries .. ':1') == start then
    own = 1  -- the usual case: one delivery and its count
  else
    local fields, flat = {}, redis.call('HGETALL', KEYS[i])
    for n = 1, #flat, 2 do fields[flat[n]] = flat[n + 1] end
    for n = 1, tonumber(fields['count:' .. retries] or '0') do
      if fields['start:' .. retries .. ':' .. n] == start then own = n end
    end
    for name, value in pairs(fields) do
      local r, n = string.match(name, '^start:(%d+):(%d+)$')
      if r and value ~= start and not fields['end:' .. r .. ':' .. n] then
        local same, later = r == retries, tonumber(r) > tonumber(retries)
        others = others or not own or later or (same and (first or tonumber(n) > own))
      end
    end
    if own and others then
      local last = tonumber(fields['count:' .. retries])
      redis.call('HDEL', KEYS[i], 'start:' .. retries .. ':' .. own, 'end:' .. retries .. ':' .. own)
      redis.call('HINCRBY', KEYS[i], 'count:' .. retries, -1)
      for _, what in ipairs({'start:', 'end:'}) do  -- the last one takes the freed number
        local moved = own < last and fields[what .. retries .. ':' .. last]
        if moved then
          redis.call('HSET', KEYS[i], what .. retries .. ':' .. own, moved)
          redis.call('HDEL', KEYS[i], what .. retries .. ':' .. last)
        end
      end
    end
  end
  if not others then gone = gone + redis.call('UNLINK', KEYS[i]) end
end
return gone
