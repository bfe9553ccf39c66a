-- Purpose: record a worker's heartbeat by the clock of Redis; delete long silent workers.
-- KEYS: 1 workers (zset)
-- ARGV: 1 worker ("pid@hostname#token", or "pid@hostname#token:release")
-- Returns: nothing
-- Complexity: O(log N + M), N known, M deleted
local FORGOTTEN_MILLIS, EXPIRES_MILLIS = 86400000, 172800000  -- a day; two days
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - FORGOTTEN_MILLIS)  -- OOM-safe order, see README
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], EXPIRES_MILLIS)
