-- Part of claim.lua, gone.lua, redrive.lua and settle.lua: which letters were redriven, so that one
-- that is in Redis and in files of an export goes once. A receipt is 12 of the 40 digits of the id's digest, in
-- the field that the first 3 digits name; a field with more than `MOST_RECEIPTS` loses its oldest.
local RECEIPTS_EXPIRE_MILLIS = 34560000000  -- 400 days after the last one
local MOST_RECEIPTS = 1365  -- of each of 4,096 fields
local function had_receipt(key, id, add)  -- with `add` the key has it from then on
  local digest, at = redis.sha1hex(id), 0
  local field, receipt = string.sub(digest, 1, 3), string.sub(digest, 4, 15)
  local kept = redis.call('HGET', key, field) or ''
  repeat at = string.find(kept, receipt, at + 1, true) until not at or at % 12 == 1
  if add and not at then
    redis.call('HSET', key, field, string.sub(kept .. receipt, -12 * MOST_RECEIPTS))
    redis.call('PEXPIRE', key, RECEIPTS_EXPIRE_MILLIS)
  end
  return at ~= nil
end
