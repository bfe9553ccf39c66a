-- Part of forget.lua, dead_letter.lua and died.lua: delete what is recorded of one message.
-- KEYS: run, as in those scripts; its number is given
-- And of what led to it: its retries have the name of its publication. Other messages of the task id
-- keep theirs, but for those that were retried: where a plain publisher named none, they may have led
-- to this one; that one of fewer retries was retried may be recorded late.
local RETRIED, KEPT_MILLIS = '"outcome":"retried"', 600000
local function forget_message(run, place)
  local fields, flat, own, others, earlier = {}, redis.call('HGETALL', KEYS[run]), {}, false, false
  local retries, publication = string.match(place, '^(%d+)(.*)$')
  for n = 1, #flat, 2 do fields[flat[n]] = flat[n + 1] end
  for name in pairs(fields) do
    local what, where, number = string.match(name, '^(%a+):([^:]+):?(%d*)$')
    local before, same = string.match(where or '', '^(%d+)(.*)$')
    local is_fewer = before and tonumber(before) < tonumber(retries)
    if where == place or (is_fewer and same == publication) then
      own[#own + 1] = name
    elseif what == 'start' and number == fields['count:' .. where] then
      local ended = fields['end:' .. where .. ':' .. number]
      if not ended and is_fewer then
        earlier = true
      elseif not ended or not string.find(ended, RETRIED, 1, true) then
        others = true
      end
    end
  end
  if not others and not earlier then return redis.call('UNLINK', KEYS[run]) end
  if others then
    redis.call('HSET', KEYS[run], 'shared', 1)
  else
    redis.call('PEXPIRE', KEYS[run], KEPT_MILLIS)
  end
  return #own > 0 and math.min(1, redis.call('HDEL', KEYS[run], unpack(own))) or 0
end
local function note_death(run, place, is_watched, ttl)  -- watched by a redrive's canary
  forget_message(run, place)
  if is_watched == 1 then
    redis.call('HSET', KEYS[run], 'died', 1)
    redis.call('PEXPIRE', KEYS[run], ttl)
  end
end
