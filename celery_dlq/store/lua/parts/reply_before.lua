-- Part of dead_letter.lua: the reply to the first attempt to store a letter, which was lost.
-- KEYS: 1 letters  9 states, as in that script
-- Another worker's letter of the same message died at another microsecond.
local function reply_before(entry, id, fingerprint, at)  -- nil if another worker stored it
  for _, one in ipairs(redis.call('XRANGE', KEYS[1], entry, entry)) do
    for n = 1, #one[2], 2 do
      if one[2][n] == 'dead_lettered_at' and one[2][n + 1] == at then
        local state = redis.call('HGET', KEYS[9], fingerprint) or ''
        return string.match(state, '^regressed|[^|]*|[^|]*|([^|]*)|') == id and 2 or 1
      end
    end
  end
end
