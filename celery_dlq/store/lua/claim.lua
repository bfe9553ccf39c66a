-- Purpose: claim letters for one operation, so that no two operations take the same letter.
-- KEYS: 1 claims (hash)  2 ids (hash)  3 letters (stream)  4 receipts (hash)
-- ARGV: 1 owner
--       2 lease (milliseconds)
--       3 previous_run_prefix (claims of owners with this prefix are taken over; empty = none)
--       4 filed (1 = the letters are in files, and perhaps here too; 0 = they are here)
--       5... letter ids, or stream positions of entries that are not letters (at most 500)
-- Returns: a list, one item per id: 1 = CLAIMED, 2 = RECLAIMED (taken over: it may have been
--          published), 3 = PUBLISHED (it was published: only remove it),
--          4 = HELD (by a live operation), 5 = GONE (no such letter, or a redriven one of a file)
-- Complexity: O(number of ids)
local CLAIMS_EXPIRE_MILLIS = 2592000000  -- 30 days
-- include: claim_state
-- include: receipt
local owner, previous_run_prefix, time = ARGV[1], ARGV[3], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claim = '|' .. owner .. '|' .. string.format('%.0f', now + tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], CLAIMS_EXPIRE_MILLIS)  -- OOM-safe order, see README
local function is_here(id)
  if redis.call('HEXISTS', KEYS[2], id) == 1 then return true end
  return string.match(id, '^%d+%-%d+$') and redis.call('XRANGE', KEYS[3], id, id)[1]
end
local states = {}
for i = 5, #ARGV do
  local id, state, note = ARGV[i], 5, nil
  local here = is_here(id)
  if here or ARGV[4] == '1' then
    state, note = claim_state(redis.call('HGET', KEYS[1], id), owner, previous_run_prefix, now)
    if state <= 2 and had_receipt(KEYS[4], id) then
      state, note = here and 3 or 5, here and 'published' or nil
    end
    if note then redis.call('HSET', KEYS[1], id, note .. claim) end
  end
  states[#states + 1] = state
end
return states
