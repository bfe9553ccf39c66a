-- Purpose: claim letters for one redrive, so that no two redrives publish one letter.
-- KEYS: 1 ids (hash)  2 claims (hash)
-- ARGV: 1 owner
--       2 lease (milliseconds)
--       3... letter ids (at most 500)
-- Returns: a list, per id: 1 = CLAIMED, 2 = RECLAIMED (an expired claim: it may have been
--          published), 3 = PUBLISHED (an expired claim, published: only remove it),
--          4 = HELD (by a live redrive), 5 = GONE (no such letter)
-- Complexity: O(number of ids)
local owner, time = ARGV[1], redis.call('TIME')  -- one clock for all operators
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claim = owner .. '|' .. string.format('%.0f', now + tonumber(ARGV[2]))
local states = {}
for i = 3, #ARGV do
  local id, state = ARGV[i], 5
  if redis.call('HEXISTS', KEYS[1], id) == 1 then
    local held = redis.call('HGET', KEYS[2], id)
    if not held then
      state = 1
    else
      local what, who, till = string.match(held, '^(%a+)|(.*)|(%d+)$')
      if who and who ~= owner and tonumber(till) > now then
        state = 4
      elseif what == 'published' then
        state = 3
      else
        state = 2
      end
    end
    if state == 3 then
      redis.call('HSET', KEYS[2], id, 'published|' .. claim)
    elseif state ~= 4 then
      redis.call('HSET', KEYS[2], id, 'claimed|' .. claim)
    end
  end
  states[#states + 1] = state
end
return states
