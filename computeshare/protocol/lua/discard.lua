-- discard.lua: delete a round that is outdated or invalid, so that the job is restored from a checkpoint.
-- Returns 1, or 0 if the version or the fence is outdated (nothing is changed).
local round_key, fence_key = KEYS[1], KEYS[2]
local dropped_keys = slice(KEYS, 3) -- the keys of the round
local token, fence = ARGV[1], ARGV[2] -- the token is empty if the round has none

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
redis.call("DEL", round_key)
for _, key in ipairs(dropped_keys) do redis.call("UNLINK", key) end
return 1
