-- Purpose: give, change or withdraw an instruction, and count up the revision by which workers
--          notice.
-- KEYS: 1 instructions (hash)
-- ARGV: 1 field (kind:id)
--       2 the instruction that is to be there (text; empty = none, * = whatever is there)
--       3 the new instruction (text, different at each call; empty = remove it)
--       4 most (number of instructions that there may be before one is added; 0 = any)
-- Returns: 1 = done, also at a second attempt whose first reply was lost; 0 = changed; 2 = full
-- Complexity: O(1)
local there = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if ARGV[2] ~= '*' and there ~= ARGV[2] then return there ~= '' and there == ARGV[3] and 1 or 0 end
local most = tonumber(ARGV[4])
-- `revision` is a field, too
if there == '' and most > 0 and redis.call('HLEN', KEYS[1]) > most then return 2 end
redis.call('PERSIST', KEYS[1])  -- changes nothing; OOM-safe order, see README
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
