-- Purpose: remove letters with their index, tally and claims; into the bin, or for good.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 groups (zset)
--       6 bin (stream)  7 binned (hash)  8 ends (zset)
-- ARGV: 1 owner (only letters that it has claimed; empty = all)
--       2 keep (milliseconds in the bin; 0 = for good)
--       3... letter ids, or stream positions of entries that are no letters (at most 500)
-- Returns: how many were removed
-- Complexity: O(number of ids)
local owner, keep = ARGV[1], tonumber(ARGV[2])
if keep > 0 then
  redis.call('PEXPIRE', KEYS[6], keep)  -- first: a full Redis lets no script begin by adding
  local time = redis.call('TIME')
  local old = string.format('%.0f', time[1] * 1000 - keep)
  for _, gone in ipairs(redis.call('XRANGE', KEYS[6], '-', old, 'COUNT', 2 * #ARGV)) do
    redis.call('HDEL', KEYS[7], gone[2][2])
    redis.call('XDEL', KEYS[6], gone[1])
  end
end
local gone, forgotten, done, seen, reasons, groups = {}, {}, {}, {}, {}, {}
for i = 3, #ARGV do
  local id, held = ARGV[i], redis.call('HGET', KEYS[4], ARGV[i])
  if owner == '' or (held and string.match(held, '^%a+|(.*)|%d+$') == owner) then
    local known = redis.call('HGET', KEYS[2], id)
    local entry = known or string.match(id, '^%d+%-%d+$')
    local found = entry and not seen[entry] and redis.call('XRANGE', KEYS[1], entry, entry)[1]
    if found and (keep == 0 or #found[2] < 4000) then
      if keep > 0 then
        redis.call('HSET', KEYS[7], id, redis.call('XADD', KEYS[6], '*', '~key', id, unpack(found[2])))
        redis.call('PEXPIRE', KEYS[6], keep)
        redis.call('PEXPIRE', KEYS[7], keep)
      end
      local letter = {}
      for n = 1, #found[2], 2 do letter[found[2][n]] = found[2][n + 1] end
      gone[#gone + 1], seen[entry] = entry, true
      local name, reason, group = letter.id or id, letter.reason, letter.fingerprint
      if reason and group and (known or redis.call('HGET', KEYS[2], name) == entry) then
        reasons[reason], groups[group] = (reasons[reason] or 0) + 1, (groups[group] or 0) + 1
        forgotten[#forgotten + 1], seen[name] = name, true
      end
    elseif not found then
      forgotten[#forgotten + 1] = id
    end
    done[#done + 1] = id
  end
end
-- One command for all, and one for each reason and group: letters of a storm share them.
local function each(command, key, names)
  return #names > 0 and redis.call(command, key, unpack(names)) or 0
end
local removed = each('XDEL', KEYS[1], gone)
each('HDEL', KEYS[2], forgotten)
each('ZREM', KEYS[8], forgotten)
each('HDEL', KEYS[4], done)
for reason, count in pairs(reasons) do
  if redis.call('HINCRBY', KEYS[3], 'reason:' .. reason, -count) <= 0 then
    redis.call('HDEL', KEYS[3], 'reason:' .. reason)
  end
end
for fingerprint, count in pairs(groups) do
  local group = 'group:' .. fingerprint
  if tonumber(redis.call('ZINCRBY', KEYS[5], -count, fingerprint)) <= 0 then
    redis.call('ZREM', KEYS[5], fingerprint)
    redis.call('HDEL', KEYS[3], group)
  else
    local first, last, example, facts =
      string.match(redis.call('HGET', KEYS[3], group) or '', '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
    if example and seen[example] then
      redis.call('HSET', KEYS[3], group, first .. '|' .. last .. '||' .. facts)
    end
  end
end
return removed
