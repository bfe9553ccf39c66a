-- Purpose: count ends of executions for circuit breakers, each in the window of its task.
-- KEYS: 1 breaker_ends (hash)  2... those of other tasks (hash)
-- ARGV: 1 fingerprint (of a letter of the first task; empty = only successes)
--       2... in turn for each task: its window (milliseconds); its successes
-- Returns: {died, all} within the window of the first task: letters with the fingerprint, and all
--          letters and successes; {0, 0} without a fingerprint
-- Complexity: O(number of tasks)
local STEPS, MOST_FINGERPRINTS = 20, 50  -- of a window; of a step, the others count in all only
local fingerprint, time = ARGV[1], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function step_of(millis) return math.floor(now / math.max(1, math.floor(millis / STEPS))) end
for i = 1, #KEYS do
  local millis, successes = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local step = step_of(millis)
  local place = step % (STEPS + 1)
  redis.call('PEXPIRE', KEYS[i], 2 * millis)  -- OOM-safe order, see README
  local found = redis.call('HGET', KEYS[i], place)
  found = found and cjson.decode(found)
  if not found or found.step ~= step then found = {step = step, all = 0, died = {}, kinds = 0} end
  found.all = found.all + successes
  if i == 1 and fingerprint ~= '' then
    local died = found.died[fingerprint]
    found.all = found.all + 1
    if died or found.kinds < MOST_FINGERPRINTS then
      found.died[fingerprint] = (died or 0) + 1
      if not died then found.kinds = found.kinds + 1 end
    end
  end
  redis.call('HSET', KEYS[i], place, cjson.encode(found))
  redis.call('PEXPIRE', KEYS[i], 2 * millis)
end
local died, all = 0, 0
if fingerprint ~= '' then
  local oldest = step_of(tonumber(ARGV[2])) - STEPS
  for _, text in ipairs(redis.call('HVALS', KEYS[1])) do
    local found = cjson.decode(text)
    if found.step >= oldest then
      died, all = died + (found.died[fingerprint] or 0), all + found.all
    end
  end
end
return {died, all}
