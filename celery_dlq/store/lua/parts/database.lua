-- Part of marker.lua and redrive.lua, which name two databases of this server, `own` and `broker`: go
-- to one of them. Append-only file and replicas get all writes of a script as one transaction.
local function select_database(number)
  if own ~= broker then redis.call('SELECT', number) end
end
