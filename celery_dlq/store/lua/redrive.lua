-- Purpose: publish letters' messages on a broker that is this server, and remove the letters.
-- KEYS: 1 letters (stream)  2 ids (hash)  3 tally (hash)  4 claims (hash)  5 groups (zset)
--       6 ends (zset)  7 newest_groups (zset)  8 gone_groups (stream)  9 operation (hash)
--       10 receipts (hash)  11 and more: queues in the broker's database (list), and runs of
--       messages with a seed (hash)
-- ARGV: 1 owner
--       2 previous_run_prefix (claims of owners with this prefix are taken over; empty = none)
--       3 call (its id; a call that is sent again gets the reply of the first time)
--       4 lists (number of the last list in KEYS)
--       5 ttl (milliseconds for which a seeded count is kept)
--       6 own (number of the letters' database)  7 broker (number of the broker's)
--       8... in turn for each letter: letter ids (at most 500); its stream position (empty = it is
--       in a file, and perhaps here); its reason; its fingerprint; number of its list in KEYS; its
--       message as kombu writes it; its seed (JSON text: number of its run in KEYS, then names and
--       values; empty = none)
-- Returns: a text of one digit per letter: 1 = CLAIMED (published and removed), 2 = RECLAIMED
--          (the same, but an interrupted redrive may have published it before), 3 = PUBLISHED
--          (before; only removed), 4 = HELD (by a live operation), 5 = GONE
-- Complexity: O(number of letters)
local REDRIVEN_EXPIRE_MILLIS = 604800000  -- a week
-- include: claim_state
-- include: removal
-- include: receipt
local own, broker = ARGV[6], ARGV[7]
-- include: database
-- include: messages
refuse_early(tonumber(ARGV[4]))
local call, states, counts, time = ARGV[3] .. '|', {}, {}, redis.call('TIME')
local now, last = time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HGET', KEYS[9], 'last')
if last and string.sub(last, 1, #call) == call then return string.sub(last, #call + 1) end
local exported, places, messages = redis.call('HEXISTS', KEYS[3], 'exported') == 1, {}, {}
for i = 8, #ARGV, 7 do
  local id, entry, list, seed, state = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 4]), ARGV[i + 6], 5
  local here = redis.call('HGET', KEYS[2], id)
  if places[id] == nil and (entry == '' or here == entry) then
    places[id], state = here, claim_state(redis.call('HGET', KEYS[4], id), ARGV[1], ARGV[2], now)
    local once = exported or entry == ''
    if state <= 2 and once and had_receipt(KEYS[10], id) then state = here and 3 or 5 end
    if state <= 2 and seed ~= '' then write_seed(cjson.decode(seed), ARGV[5]) end
    if state <= 2 then messages[list] = messages[list] or {} end
    if state <= 2 then table.insert(messages[list], ARGV[i + 5]) end
  end
  states[#states + 1] = state
end
push(messages)
for n, state in ipairs(states) do
  local id, entry = ARGV[7 * n + 1], ARGV[7 * n + 2]
  if state <= 2 and (exported or entry == '') then had_receipt(KEYS[10], id, true) end
  if state <= 3 and places[id] then note(places[id], id, ARGV[7 * n + 3], ARGV[7 * n + 4]) end
  if state <= 3 then claims[#claims + 1] = id end
  counts[state] = (counts[state] or 0) + 1
end
remove_noted()
if #claims > 0 then
  redis.call('HSET', KEYS[9], 'last', call .. table.concat(states))
  for state, letters in pairs(counts) do redis.call('HINCRBY', KEYS[9], state, letters) end
  redis.call('PEXPIRE', KEYS[9], REDRIVEN_EXPIRE_MILLIS)
end
return table.concat(states)
