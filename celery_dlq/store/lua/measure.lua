-- Purpose: add the counts of one process to those of the app, in a bounded number of fields.
-- KEYS: 1 counts (hash)  2 gauges (hash)
-- ARGV: 1 most (maximum of fields; beyond it, new ones are added to their substitutes)
--       2 worker (its node name; empty = not a worker)
--       3 gauges (JSON text)
--       4... names of a field and of its substitute, and the number to add, in turn
-- Returns: the number of additions
-- Complexity: O(number of fields)
local COUNTS_EXPIRE_MILLIS = 7776000000  -- 90 days
local GAUGES_EXPIRE_MILLIS = 3600000  -- an hour
local MAX_WORKERS = 10000
redis.call('PEXPIRE', KEYS[1], COUNTS_EXPIRE_MILLIS)  -- OOM-safe order, see README
local fields, most, added = redis.call('HLEN', KEYS[1]), tonumber(ARGV[1]), 0
for i = 4, #ARGV, 3 do
  local name = ARGV[i]
  if fields + added >= most and redis.call('HEXISTS', KEYS[1], name) == 0 then
    name = ARGV[i + 1]
  end
  redis.call('HINCRBY', KEYS[1], name, ARGV[i + 2])
  added = added + 1
end
if ARGV[2] ~= '' then
  if redis.call('HLEN', KEYS[2]) >= MAX_WORKERS then redis.call('DEL', KEYS[2]) end
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[2], ARGV[2], time[1] .. '|' .. ARGV[3])
  redis.call('PEXPIRE', KEYS[2], GAUGES_EXPIRE_MILLIS)
end
return added
