-- Purpose: give unused claims back.
-- KEYS: 1 claims (hash)
-- ARGV: 1 owner
--       2 doubtful (1 = the messages may have been published, and the next owner must know)
--       3... letter ids (at most 500)
-- Returns: the number of claims given back
-- Complexity: O(number of ids)
local CLAIMS_EXPIRE_MILLIS = 2592000000  -- 30 days
local released = 0
redis.call('PEXPIRE', KEYS[1], CLAIMS_EXPIRE_MILLIS)  -- OOM-safe order, see README
for i = 3, #ARGV do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  local what, owner = string.match(held or '', '^(%a+)|(.*)|%d+$')
  if owner == ARGV[1] and what ~= 'published' then
    if what == 'claimed' and ARGV[2] == '0' then
      redis.call('HDEL', KEYS[1], ARGV[i])
    else
      redis.call('HSET', KEYS[1], ARGV[i], 'reclaimed|' .. owner .. '|0')
    end
    released = released + 1
  end
end
return released
