-- close_audit.lua: delete the copy of a unit, and end the dispute about it, unless the copy proved nothing about a unit
-- that is suspected. If two machines sent the same, note that the unit is of no machine's share.
-- Returns 1, or 0 if the version or the fence is outdated (nothing is changed).
local round_key, fence_key, copies_key, disputes_key, copy_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local token, fence = ARGV[1], ARGV[2]
local micro_batch = ARGV[3]
local outcome = ARGV[4] -- of the dispute: `agreed` if two machines sent the same; `open` if it goes on; else `over`

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
redis.call("HDEL", copies_key, micro_batch)
redis.call("UNLINK", copy_key)
if outcome == "agreed" then
  redis.call("HSET", disputes_key, micro_batch, '{"ends":0,"copied":false,"parties":{}}')
elseif outcome == "over" then
  redis.call("HDEL", disputes_key, micro_batch)
end
return 1
