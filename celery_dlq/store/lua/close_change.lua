-- Purpose: end a change that was open while its operation ran, and put it into the audit log.
-- KEYS: 1 open_changes (hash)  2 changes (stream)
-- ARGV: 1 operation (its id)
--       2 the open change that is to be there (text)
--       3 the change for the log (text; empty = nothing was changed)
--       4 most (number of changes that the log keeps, about)
-- Returns: 1 if it was open, else 0: another process has ended it
-- Complexity: O(1)
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
if ARGV[3] ~= '' then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'change', ARGV[3])
end
return 1
