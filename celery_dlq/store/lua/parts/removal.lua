-- Part of remove.lua and redrive.lua: note the letters to remove, then remove them all at once.
-- KEYS: 1 letters  2 ids  3 tally  4 claims  5 groups  6 ends  7 newest_groups  8 gone_groups, as in
--       those scripts
local MAX_GONE, GONE_EXPIRE_MILLIS = 1000, 7776000000  -- 90 days, as notes and states
local entries, ids, claims, seen, reasons, groups = {}, {}, {}, {}, {}, {}
local function note(entry, name, reason, group)  -- the last two only if it is tallied
  entries[#entries + 1], seen[entry] = entry, true
  if reason and group then
    reasons[reason], groups[group] = (reasons[reason] or 0) + 1, (groups[group] or 0) + 1
    ids[#ids + 1], seen[name] = name, true
  end
end
local function for_all(command, key, names)
  return #names > 0 and redis.call(command, key, unpack(names)) or 0
end
local function remove_noted()
  for_all('HDEL', KEYS[2], ids)
  for_all('ZREM', KEYS[6], ids)
  for_all('HDEL', KEYS[4], claims)
  for reason, count in pairs(reasons) do  -- summed up: the letters of a storm share them
    local left = redis.pcall('HINCRBY', KEYS[3], 'reason:' .. reason, -count)
    if type(left) ~= 'number' or left <= 0 then redis.call('HDEL', KEYS[3], 'reason:' .. reason) end
  end
  for fingerprint, count in pairs(groups) do
    local left = tonumber(redis.call('ZINCRBY', KEYS[5], -count, fingerprint))
    local text = redis.call('HGET', KEYS[3], 'group:' .. fingerprint) or ''
    local first, last, example, others = string.match(text, '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
    if left <= 0 then
      redis.call('ZREM', KEYS[5], fingerprint)
      redis.call('ZREM', KEYS[7], fingerprint)
      redis.call('HDEL', KEYS[3], 'group:' .. fingerprint)
      if first then  -- people resolve a cause once its letters are redriven
        redis.pcall('XADD', KEYS[8], 'MAXLEN', MAX_GONE, '*', fingerprint,
          first .. '|' .. last .. '||' .. others)
        redis.call('PEXPIRE', KEYS[8], GONE_EXPIRE_MILLIS)
      end
    elseif example and seen[example] then
      redis.call('HSET', KEYS[3], 'group:' .. fingerprint, first .. '|' .. last .. '||' .. others)
    end
  end
  return for_all('XDEL', KEYS[1], entries)
end
