-- Purpose: remove letters with their index, tally and claims: to the bin, or for good.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 groups (zset)
--       6 bin (stream)  7 binned (hash)  8 ends (zset)
-- ARGV: 1 owner (only letters that it has claimed; empty = all)
--       2 keep (milliseconds in the bin; 0 = for good)
--       3... letter ids, or stream positions of entries that are not letters (at most 500)
-- Returns: the number of letters removed
-- Complexity: O(number of ids)
local MAX_PARTS = 4000  -- of an entry that can move to the bin: Lua's unpack has a limit
local owner, keep = ARGV[1], tonumber(ARGV[2])
if keep > 0 then redis.call('PEXPIRE', KEYS[6], keep) end  -- OOM-safe order, see README
local entries, ids, claims, seen, reasons, groups = {}, {}, {}, {}, {}, {}
for i = 3, #ARGV do
  local id, claim = ARGV[i], redis.call('HGET', KEYS[4], ARGV[i])
  if owner == '' or (claim and string.match(claim, '^%a+|(.*)|%d+$') == owner) then
    local indexed = redis.call('HGET', KEYS[2], id)
    local entry = indexed or string.match(id, '^%d+%-%d+$')
    local found = entry and not seen[entry] and redis.call('XRANGE', KEYS[1], entry, entry)[1]
    if found and (keep == 0 or #found[2] < MAX_PARTS) then
      if keep > 0 then
        redis.call('HSET', KEYS[7], id, redis.call('XADD', KEYS[6], '*', '~key', id, unpack(found[2])))
        redis.call('PEXPIRE', KEYS[6], keep)
        redis.call('PEXPIRE', KEYS[7], keep)
      end
      local letter = {}
      for n = 1, #found[2], 2 do letter[found[2][n]] = found[2][n + 1] end
      local name, reason, group = letter.id or id, letter.reason, letter.fingerprint
      entries[#entries + 1], seen[entry] = entry, true
      if reason and group and (indexed or redis.call('HGET', KEYS[2], name) == entry) then
        reasons[reason], groups[group] = (reasons[reason] or 0) + 1, (groups[group] or 0) + 1
        ids[#ids + 1], seen[name] = name, true
      end
    elseif not found then
      ids[#ids + 1] = id
    end
    claims[#claims + 1] = id
  end
end
local function for_all(command, key, names)
  return #names > 0 and redis.call(command, key, unpack(names)) or 0
end
for_all('HDEL', KEYS[2], ids)
for_all('ZREM', KEYS[8], ids)
for_all('HDEL', KEYS[4], claims)
for reason, count in pairs(reasons) do  -- summed up: the letters of a storm share them
  local left = redis.call('HINCRBY', KEYS[3], 'reason:' .. reason, -count)
  if left <= 0 then redis.call('HDEL', KEYS[3], 'reason:' .. reason) end
end
for fingerprint, count in pairs(groups) do
  local left = tonumber(redis.call('ZINCRBY', KEYS[5], -count, fingerprint))
  local text = redis.call('HGET', KEYS[3], 'group:' .. fingerprint) or ''
  local first, last, example, facts = string.match(text, '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
  if left <= 0 then
    redis.call('ZREM', KEYS[5], fingerprint)
    redis.call('HDEL', KEYS[3], 'group:' .. fingerprint)
  elseif example and seen[example] then
    redis.call('HSET', KEYS[3], 'group:' .. fingerprint, first .. '|' .. last .. '||' .. facts)
  end
end
return for_all('XDEL', KEYS[1], entries)
