-- Purpose: record a worker's heartbeat by the clock of Redis, or its info, and delete silent workers.
-- KEYS: 1 nodes (zset)  2 worker_infos (hash)  3 tasks (hash)  4 instructions (hash)
--       5 waiting_jobs (zset)
-- ARGV: 1 worker (its node name)
--       2 silent (milliseconds without a heartbeat after which a worker is deleted)
--       3 info (JSON text; empty = only a heartbeat)
--       4 tasks (JSON text of their names)
-- Returns: {known, revision, jobs}: 1 if its info is stored, else 0; revision of the instructions,
--   -1 if it is no number;
--   1 if a job waits and may start now, else 0
-- Complexity: O(log N + M), N workers known, M deleted (at most 100)
local NODES_EXPIRE_MILLIS, MAX_DELETED = 172800000, 100  -- two days
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('PEXPIRE', KEYS[1], NODES_EXPIRE_MILLIS)  -- OOM-safe order, see README
redis.call('ZADD', KEYS[1], now, ARGV[1])
if ARGV[3] ~= '' then
  local silent = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]), 'LIMIT', 0,
    MAX_DELETED)
  for _, node in ipairs(silent) do
    redis.call('ZREM', KEYS[1], node)
    redis.call('HDEL', KEYS[2], node)
    redis.call('HDEL', KEYS[3], node)
  end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
end
local known = redis.call('HEXISTS', KEYS[2], ARGV[1])
local due = #redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now, 'LIMIT', 0, 1)
return {known, tonumber(redis.call('HGET', KEYS[4], 'revision') or '0') or -1, due}
