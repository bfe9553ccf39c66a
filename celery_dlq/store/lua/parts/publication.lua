-- Part of forget.lua, dead_letter.lua and died.lua: delete what is recorded of one message.
-- KEYS: run, as in those scripts; its number is given
-- And of what led to it: its retries have the name of its publication. Other messages of the task id
-- keep theirs, but for those that were retried: where a plain publisher named none, they may have led
-- to this one.
local RETRIED = '"outcome":"retried"'
local function forget_message(run, place, flat)  -- with all fields of the run, and their values
  if #flat == 4 and (flat[1] == 'count:' .. place or flat[3] == 'count:' .. place) then
    return redis.call('UNLINK', KEYS[run])  -- the usual case: one delivery and its count
  end
  local fields, own, others = {}, {}, false
  local retries, publication = string.match(place, '^(%d+)(.*)$')
  for n = 1, #flat, 2 do fields[flat[n]] = flat[n + 1] end
  for name in pairs(fields) do
    local what, where, number = string.match(name, '^(%a+):([^:]+):?(%d*)$')
    local before, same = string.match(where or '', '^(%d+)(.*)$')
    if where == place or (same == publication and tonumber(before) < tonumber(retries)) then
      own[#own + 1] = name
    elseif what == 'start' and number == fields['count:' .. where] then
      local ended = fields['end:' .. where .. ':' .. number] or ''
      others = others or not string.find(ended, RETRIED, 1, true)
    end
  end
  if not others then return redis.call('UNLINK', KEYS[run]) end
  -- Deletes first: a full Redis refuses a script whose first write needs memory.
  local gone = #own > 0 and math.min(1, redis.call('HDEL', KEYS[run], unpack(own))) or 0
  redis.call('HSET', KEYS[run], 'shared', 1)
  return gone
end
local function note_death(run, place, flat, ttl)
  local watched = false  -- by a redrive's canary; or noted before
  forget_message(run, place, flat)
  for n = 1, #flat, 2 do
    watched = watched or flat[n] == 'watched' or flat[n] == 'died'
  end
  if watched then
    redis.call('HSET', KEYS[run], 'died', 1)
    redis.call('PEXPIRE', KEYS[run], ttl)
  end
end
