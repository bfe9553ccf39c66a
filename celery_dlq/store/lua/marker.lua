-- Purpose: write a key into the broker's database, if that is one of this server.
-- KEYS: 1 marker (string)
-- ARGV: 1 own (number of the letters' database)  2 broker (number of the broker's)
-- Returns: nothing
-- Complexity: O(1)
local MARKER_EXPIRE_MILLIS = 60000
local own, broker = ARGV[1], ARGV[2]
-- include: database
select_database(broker)
redis.call('SET', KEYS[1], 1, 'PX', MARKER_EXPIRE_MILLIS)
