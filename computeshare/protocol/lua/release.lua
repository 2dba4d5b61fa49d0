-- release.lua: hand back the micro-batches that a session has leased, which it does not compute after all.
-- Returns the number of micro-batches freed.
local leases_key, backups_key, audits_key, free_key, versions_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local session = ARGV[1]

local freed = free_leases(leases_key, backups_key, audits_key, free_key, session)
if #freed > 0 then wake(versions_key, "freed", #freed) end
return #freed
