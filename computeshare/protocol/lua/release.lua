-- release.lua: hand back the micro-batches that a session has leased, which it does not compute after all.
-- Returns the number of micro-batches freed, or -1 if the session is not the worker's current one (nothing is changed).
local sessions_key, leases_key, backups_key, audits_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local free_key, versions_key = KEYS[5], KEYS[6]
local worker, session = ARGV[1], ARGV[2]

if redis.call("HGET", sessions_key, worker) ~= session then return -1 end
local freed = free_leases(leases_key, backups_key, audits_key, free_key, session)
if #freed > 0 then wake(versions_key, "freed", #freed) end
return #freed
