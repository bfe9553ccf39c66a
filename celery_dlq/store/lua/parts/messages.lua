-- Part of redrive.lua: the lists of the broker, and the counts that messages begin with.
-- KEYS: 1 letters  2 ids  5 groups  10 receipts  11 and more, as there
local function refuse_early(last_list)
  -- Nothing is undone when a script fails. What may refuse a later command (a full or read-only
  -- Redis, a missing permission, a key of another type) refuses these, which change nothing.
  select_database(broker)
  for i = 11, last_list do redis.call('LLEN', KEYS[i]) end
  select_database(own)
  redis.call('ZADD', KEYS[5], 'XX', 0, '')
  for _, place in ipairs({2, 10}) do redis.call('HDEL', KEYS[place], '') end
  redis.call('XDEL', KEYS[1], '0-1')
end
local function write_seed(seed, ttl)
  local run = seed[1]
  redis.call('HSET', KEYS[run], unpack(seed, 2))
  redis.call('PEXPIRE', KEYS[run], ttl)
end
local function push(messages)  -- by number of a list in KEYS, oldest first
  select_database(broker)
  for list, some in pairs(messages) do redis.call('LPUSH', KEYS[list], unpack(some)) end
  select_database(own)
end
