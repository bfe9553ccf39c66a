-- Purpose: tell which letters of files were redriven, and have neither a letter nor a claim here.
-- KEYS: 1 ids (hash)  2 receipts (hash)  3 claims (hash)
-- ARGV: letter ids (at most 500)
-- Returns: a text of one digit per letter: 1 = it was redriven and is gone, 0 = it may be redriven
-- Complexity: O(number of ids)
local gone = {}
-- include: receipt
for n, id in ipairs(ARGV) do
  local left = redis.call('HEXISTS', KEYS[1], id) + redis.call('HEXISTS', KEYS[3], id)
  gone[n] = left == 0 and had_receipt(KEYS[2], id) and 1 or 0
end
return table.concat(gone)
