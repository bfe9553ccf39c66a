-- Purpose: assign a position to a letter, before it is put into its queue on the broker.
-- KEYS: 1 last (string)  2 placing (hash)  3 claims (hash)
-- ARGV: 1 letter id
--       2 kept (milliseconds for which a letter that is stored again keeps its position)
-- Returns: the position, as "milliseconds since 1970-number"
-- Complexity: O(1)
local id, time = ARGV[1], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PERSIST', KEYS[1])  -- OOM-safe order, see README
-- An old claim is left of a letter that another program took out of the queue.
redis.call('HDEL', KEYS[3], id)
local known = redis.call('HGET', KEYS[2], id)
-- A worker that was killed before placed.lua puts the letter again, at the same position.
if known and tonumber(string.match(known, '^%d+')) + ARGV[2] > now then return known end
local last, count = string.match(redis.call('GET', KEYS[1]) or '0-0', '^(%d+)-(%d+)$')
local position = string.format('%.0f-0', now)
if now <= tonumber(last) then
  position = last .. '-' .. string.format('%.0f', count + 1)
end
redis.call('SET', KEYS[1], position)
redis.call('HSET', KEYS[2], id, position)
return position
