-- Purpose: put a discarded letter back as the newest of its queue.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 groups (zset)  5 bin (stream)
--       6 binned (hash)  7 newest_groups (zset)  8 operation (hash)
-- ARGV: 1 letter id, or the position under which the entry was discarded
--       2 facts of its group, in case it is gone (JSON text; see dead_letter.lua)
--       3 operation (1 = count it as restored by that; 0 = not)
-- Returns: 1 = RESTORED, 0 = NOT_THERE, 2 = TAKEN (the queue has another letter of this id)
-- Complexity: O(number of fields + log N), N groups
local OPERATION_EXPIRE_MILLIS = 2592000000  -- 30 days
-- include: entry
local entry = redis.call('HGET', KEYS[6], ARGV[1])
local found = entry and redis.call('XRANGE', KEYS[5], entry, entry)[1]
if not found then return 0 end
local fields, letter = found[2], {}
for n = 5, #fields, 2 do letter[fields[n]] = fields[n + 1] end
if letter.id and redis.call('HEXISTS', KEYS[2], letter.id) == 1 then return 2 end
redis.call('XDEL', KEYS[5], '0-1')  -- deletes nothing; OOM-safe order, see README
local place = add_entry(3, fields, 5)
if letter.id and letter.reason and letter.fingerprint then
  redis.call('HSET', KEYS[2], letter.id, place)
  redis.pcall('HINCRBY', KEYS[3], 'reason:' .. letter.reason, 1)
  redis.call('ZINCRBY', KEYS[4], 1, letter.fingerprint)
  local group, at = 'group:' .. letter.fingerprint, letter.dead_lettered_at or '0'
  local first, last, _, others =
    string.match(redis.call('HGET', KEYS[3], group) or '', '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
  others = others or '|0:0||' .. ARGV[2]  -- without a course: it did not arrive now
  first = tonumber(first or at) < tonumber(at) and first or at
  last = tonumber(last or at) > tonumber(at) and last or at
  redis.call('HSET', KEYS[3], group, table.concat({first, last, letter.id, others}, '|'))
  redis.call('ZADD', KEYS[7], last, letter.fingerprint)
end
redis.pcall('HINCRBY', KEYS[3], 'restored', 1)  -- stored twice, and left once at most
redis.call('XDEL', KEYS[5], entry)
redis.call('HDEL', KEYS[6], ARGV[1])
if ARGV[3] == '1' then
  redis.call('HINCRBY', KEYS[8], 'restored', 1)
  redis.call('PEXPIRE', KEYS[8], OPERATION_EXPIRE_MILLIS)
end
return 1
