-- release.lua: hand back micro-batches that a session has leased and does not compute after all.
-- Returns the number of micro-batches freed.
local leases_key, backups_key, audits_key, free_key, versions_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local session = ARGV[1]
local micro_batches = slice(ARGV, 2) -- none: all that the session has leased

local only = #micro_batches > 0 and {} or nil
for _, micro_batch in ipairs(micro_batches) do only[micro_batch] = true end
local freed = free_leases(leases_key, backups_key, audits_key, free_key, session, only)
if #freed > 0 then wake(versions_key, "freed", #freed) end
return #freed
