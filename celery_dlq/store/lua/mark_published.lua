-- Purpose: record that the broker confirmed the messages of letters that this owner claimed.
-- KEYS: 1 claims (hash)
-- ARGV: 1 owner
--       2... letter ids (at most 500)
-- Returns: the number of letters marked
-- Complexity: O(number of ids)
local CLAIMS_EXPIRE_MILLIS = 2592000000  -- 30 days
local marked = 0
redis.call('PEXPIRE', KEYS[1], CLAIMS_EXPIRE_MILLIS)  -- OOM-safe order, see README
for i = 2, #ARGV do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  -- A letter that is gone must not be marked: it may come back, by a restore.
  if held and string.match(held, '^%a+|(.*)|%d+$') == ARGV[1] then
    redis.call('HSET', KEYS[1], ARGV[i], 'published|' .. ARGV[1] .. '|0')
    marked = marked + 1
  end
end
return marked
