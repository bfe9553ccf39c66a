-- Purpose: read the positions of a queue on the broker, as they are at one moment.
-- KEYS: 1 last (string)  2 placing (hash)
-- ARGV: none
-- Returns: {newest position or empty, positions of letters that are being put, {seconds,
--          microseconds} now}
-- Complexity: O(number of letters that are being put)
return {redis.call('GET', KEYS[1]) or '', redis.call('HVALS', KEYS[2]), redis.call('TIME')}
