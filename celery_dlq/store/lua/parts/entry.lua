-- Part of dead_letter.lua and restore.lua: add a letter's entry, and note if it is large.
-- KEYS: 1 letters, as in those scripts; and the tally
local LARGE_BYTES = 16384  -- 500 smaller ones are a page: see `celery_dlq.store.stream`
local function add_entry(tally, parts, first)
  local entry, size = redis.call('XADD', KEYS[1], '*', unpack(parts, first)), 0
  for n = first + 1, #parts, 2 do size = size + #parts[n] end
  if size > LARGE_BYTES then redis.call('HSET', KEYS[tally], 'large', entry) end
  return entry
end
