-- Purpose: remove letters with their index, tally and claims.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 ends (zset)
-- ARGV: letter ids (at most 500)
-- Returns: how many letters were there
-- Complexity: O(number of ids)
local removed = 0
for _, id in ipairs(ARGV) do
  local entry = redis.call('HGET', KEYS[2], id)
  if entry then
    local found = redis.call('XRANGE', KEYS[1], entry, entry)[1]
    if found then
      redis.call('XDEL', KEYS[1], entry)  -- first: a full Redis lets no script begin by adding
      local letter = {}
      for i = 1, #found[2], 2 do
        letter[found[2][i]] = found[2][i + 1]
      end
      local fingerprint = letter['fingerprint'] or ''
      if letter['reason'] and redis.call('HINCRBY', KEYS[3], 'reason:' .. letter['reason'], -1) <= 0 then
        redis.call('HDEL', KEYS[3], 'reason:' .. letter['reason'])
      end
      if redis.call('HINCRBY', KEYS[3], 'count:' .. fingerprint, -1) <= 0 then
        redis.call('HDEL', KEYS[3], 'count:' .. fingerprint, 'first:' .. fingerprint,
          'last:' .. fingerprint, 'example:' .. fingerprint, 'facts:' .. fingerprint)
      elseif redis.call('HGET', KEYS[3], 'example:' .. fingerprint) == id then
        redis.call('HSET', KEYS[3], 'example:' .. fingerprint, '')
      end
      removed = removed + 1
    end
    redis.call('HDEL', KEYS[2], id)
  end
  redis.call('HDEL', KEYS[4], id)
  redis.call('ZREM', KEYS[5], id)
end
return removed
