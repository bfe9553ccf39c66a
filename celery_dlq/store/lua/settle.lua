-- Purpose: record what became of letters that this owner claimed: published, or given back.
-- KEYS: 1 claims (hash)  2 receipts (hash)  3 tally (hash)
-- ARGV: 1 owner
--       2 outcome (published = the broker confirmed the messages; reclaimed = given back, and the
--         next owner must know that they may have been published; free = given back unused)
--       3 filed (1 = the letters are in files; 0 = they are here)
--       4... letter ids (at most 500)
-- Returns: the number of claims settled
-- Complexity: O(number of ids)
local CLAIMS_EXPIRE_MILLIS = 2592000000  -- 30 days
-- include: receipt
local owner, outcome, settled = ARGV[1], ARGV[2], 0
redis.call('PEXPIRE', KEYS[1], CLAIMS_EXPIRE_MILLIS)  -- OOM-safe order, see README
local receipts = outcome == 'published'
  and (ARGV[3] == '1' or redis.call('HEXISTS', KEYS[3], 'exported') == 1)
for i = 4, #ARGV do
  -- A letter that is gone must not be marked: it may come back, by a restore.
  local what, who = string.match(redis.call('HGET', KEYS[1], ARGV[i]) or '', '^(%a+)|(.*)|%d+$')
  if who == owner and (outcome == 'published' or what ~= 'published') then
    if receipts then had_receipt(KEYS[2], ARGV[i], true) end
    if outcome == 'free' and what == 'claimed' then
      redis.call('HDEL', KEYS[1], ARGV[i])
    else
      local state = outcome == 'published' and outcome or 'reclaimed'
      redis.call('HSET', KEYS[1], ARGV[i], state .. '|' .. owner .. '|0')
    end
    settled = settled + 1
  end
end
return settled
