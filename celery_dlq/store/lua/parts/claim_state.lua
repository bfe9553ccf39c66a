-- Part of claim.lua and redrive.lua: the state in which an operation finds a letter that is there.
-- Returns a number of ClaimReply, and the state to note in the claim (nil: another has it).
local function claim_state(claim, owner, previous_run_prefix, now)
  local what, who, till = string.match(claim or '', '^(%a+)|(.*)|(%d+)$')
  -- The owner's own claim, sent again after a timeout, gets the same reply.
  local free = who ~= owner and (not who or tonumber(till) <= now
    or (previous_run_prefix ~= '' and string.sub(who, 1, #previous_run_prefix) == previous_run_prefix))
  if not who then return 1, 'claimed' end
  if who ~= owner and not free then return 4, nil end
  if what == 'published' then return 3, what end
  -- An operation that only removes letters has published none of them: see REMOVES in claims.py.
  local removes = string.sub(who, -8) == '#removes'
  if what == 'claimed' and (who == owner or removes) then return 1, what end
  return 2, 'reclaimed'
end
