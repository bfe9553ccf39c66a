-- Purpose: return where a queue ends, without the letters there, which may be large.
-- KEYS: 1 letters (stream)
-- ARGV: none
-- Returns: {last entry id ever generated, number of entries ever added}; the number is empty
--          before Redis 7.0; an empty list if there is no queue
-- Complexity: O(1)
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local ask, found = redis.call, {}  -- the subcommand comes before the key
local info = ask('XINFO', 'STREAM', KEYS[1])
for n = 1, #info, 2 do found[info[n]] = info[n + 1] end
return {found['last-generated-id'], found['entries-added'] or ''}
