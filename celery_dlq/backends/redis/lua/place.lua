-- Purpose: give a letter its position, before it is put into its queue on the broker.
-- KEYS: 1 last (string)  2 placing (hash)  3 claims (hash)
-- ARGV: 1 letter id
--       2 patience (milliseconds for which a position waits for its letter)
-- Returns: the position: time in milliseconds, a dash, a number
-- Complexity: O(1)
local id, time = ARGV[1], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PERSIST', KEYS[1])  -- OOM-safe order, see README
-- An old claim is of a letter that left the queue by another hand.
redis.call('HDEL', KEYS[3], id)
local known = redis.call('HGET', KEYS[2], id)
-- Killed before it was noted as placed, a worker puts its letter there again, at one position.
if known and tonumber(string.match(known, '^%d+')) + ARGV[2] > now then return known end
local last, count = string.match(redis.call('GET', KEYS[1]) or '0-0', '^(%d+)-(%d+)$')
local position = string.format('%.0f-0', now)
if now <= tonumber(last) then
  position = last .. '-' .. string.format('%.0f', count + 1)
end
redis.call('SET', KEYS[1], position)
redis.call('HSET', KEYS[2], id, position)
return position
