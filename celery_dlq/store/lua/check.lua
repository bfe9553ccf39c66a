-- Purpose: write, read and remove values of every type, to see what this Redis refuses.
-- KEYS: 1 a (hash)  2 b (zset)  3 c (stream)  4 d (set)  5 e (string); none is there afterwards
-- ARGV: none
-- Returns: the refusals, each as "COMMAND error"; a full Redis refuses the first write
-- Complexity: O(1)
local refusals = {}
local function try(command, ...)
  local reply = redis.pcall(command, ...)
  -- "no such key" follows from a write that was refused.
  if type(reply) == 'table' and reply.err and not string.find(reply.err, 'no such key') then
    refusals[#refusals + 1] = command .. ' ' .. reply.err
  end
  return reply
end
try('HSET', KEYS[1], 'f', 'written')
if #refusals == 0 and redis.call('HGET', KEYS[1], 'f') ~= 'written' then
  refusals[1] = 'HGET does not return what HSET wrote'
end
for _, command in ipairs({'HGETALL', 'HKEYS', 'HLEN', 'HVALS'}) do try(command, KEYS[1]) end
for _, command in ipairs({'HDEL', 'HEXISTS', 'HGET', 'HMGET'}) do try(command, KEYS[1], 'f') end
try('HINCRBY', KEYS[1], 'n', 1)
try('HSCAN', KEYS[1], 0)
try('HSETNX', KEYS[1], 'f', 'v')
try('ZADD', KEYS[2], 1, 'm')
try('ZINCRBY', KEYS[2], 1, 'm')
for _, command in ipairs({'ZSCORE', 'ZMSCORE'}) do try(command, KEYS[2], 'm') end
try('ZCARD', KEYS[2])
for _, command in ipairs({'ZRANGE', 'ZREVRANGE', 'ZRANGEBYSCORE'}) do try(command, KEYS[2], 0, 1) end
for _, command in ipairs({'ZREMRANGEBYRANK', 'ZREMRANGEBYSCORE'}) do try(command, KEYS[2], 0, 0) end
try('ZREM', KEYS[2], 'm')
try('XADD', KEYS[3], '*', 'f', 'v')
try('XLEN', KEYS[3])
try('XINFO', 'STREAM', KEYS[3])
try('XRANGE', KEYS[3], '-', '+')
try('XREVRANGE', KEYS[3], '+', '-')
try('XDEL', KEYS[3], '0-1')
try('SADD', KEYS[4], 'm')
try('SMEMBERS', KEYS[4])
for _, command in ipairs({'SISMEMBER', 'SREM'}) do try(command, KEYS[4], 'n') end
try('SET', KEYS[5], 'v')
try('GET', KEYS[5])
try('EXISTS', KEYS[5])
try('PERSIST', KEYS[5])
try('PEXPIRE', KEYS[5], 1000)
try('EXPIRE', KEYS[5], 1)
try('TIME')
try('UNLINK', KEYS[5])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5])
return refusals
