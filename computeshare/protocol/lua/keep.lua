-- keep.lua: store a staged state, and delete the data from which it could be recomputed.
-- Returns 1, or 0 if the version or the fence is outdated or the job is gone (only the staged state is deleted).
local round_key, fence_key, staged_state_key, state_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local steps_key = KEYS[5]
local dropped_keys = slice(KEYS, 6)
local token, fence = ARGV[1], ARGV[2] -- the token is the state's

if has_moved_on(round_key, fence_key, token, fence) then
  redis.call("UNLINK", staged_state_key)
  return 0
end
keep_staged(staged_state_key, state_key)
redis.call("DEL", steps_key)
for _, key in ipairs(dropped_keys) do redis.call("UNLINK", key) end
return 1
