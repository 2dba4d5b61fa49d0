-- close_audit.lua: end the audit of a unit: delete its copy, and the dispute about it. If two machines sent the same, note
-- that the unit is of no machine's share.
-- Returns 1, or 0 if the version or the fence is outdated (nothing is changed).
local round_key, fence_key, copies_key, disputes_key, copy_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local token, fence = ARGV[1], ARGV[2]
local micro_batch = ARGV[3]
local agreed = ARGV[4] -- 1 if two machines sent the same; else 0

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
redis.call("HDEL", copies_key, micro_batch)
redis.call("UNLINK", copy_key)
if agreed == "1" then
  redis.call("HSET", disputes_key, micro_batch, '{"ends":0,"copied":false,"parties":{}}')
else
  redis.call("HDEL", disputes_key, micro_batch)
end
return 1
