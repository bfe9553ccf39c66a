-- Purpose: delete the counts of messages that are done; other messages of a task id keep theirs.
-- KEYS: 1... runs (hashes)
-- ARGV: in turn for each run: place (of the message among those of its task id); start (of its last
--       delivery); first (1 = that was its first delivery, so earlier counts belong to an equal
--       message; 0 = it was not)
-- Returns: the number of runs deleted, or cleared of their message
-- Complexity: O(number of runs and of their deliveries)
local gone = 0
-- include: publication
for i = 1, #KEYS do
  local place, start, first = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i] == '1'
  local own, others, flat = nil, false, redis.call('HGETALL', KEYS[i])
  local fields = {}
  for n = 1, #flat, 2 do fields[flat[n]] = flat[n + 1] end
  local function at(what, n) return fields[what .. place .. ':' .. n] end
  if #flat == 4 and at('start:', 1) == start then
    gone = gone + redis.call('UNLINK', KEYS[i])  -- the usual case: one delivery and its count
  else
    local last = tonumber(fields['count:' .. place] or '0')
    for n = 1, last do
      if at('start:', n) == start then own = n end
    end
    for n = 1, last do  -- copies of the message that run elsewhere
      local value = at('start:', n)
      if value and value ~= start and not at('end:', n) then
        others = others or not own or first or n > own
      end
    end
    if own and others then
      redis.call('HDEL', KEYS[i], 'start:' .. place .. ':' .. own, 'end:' .. place .. ':' .. own)
      redis.call('HINCRBY', KEYS[i], 'count:' .. place, -1)
      for _, what in ipairs({'start:', 'end:'}) do  -- the last one takes the freed number
        local moved = own < last and at(what, last)
        if moved then
          redis.call('HSET', KEYS[i], what .. place .. ':' .. own, moved)
          redis.call('HDEL', KEYS[i], what .. place .. ':' .. last)
        end
      end
    elseif not others then
      gone = gone + forget_message(i, place, flat)
    end
  end
end
return gone
