-- republish.lua: replace damaged weights of the current version with the reducer's own copy.
-- Returns 1, or 0 if the version or the fence is outdated (nothing is changed).
local round_key, fence_key, staged_weights_key, weights_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local news_key, versions_key, events_key = KEYS[5], KEYS[6], KEYS[7]
local token, fence = ARGV[1], ARGV[2]
local is_snapshot = ARGV[3] -- 1 if versions are differences: the staged weights become a snapshot; else 0

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
keep_staged(staged_weights_key, weights_key) -- first write
redis.call("UNLINK", news_key) -- may be damaged, too; workers that wait for news read the weights instead
if is_snapshot == "1" then redis.call("HSET", round_key, "snapshot", token) end
redis.call("HDEL", round_key, "doubted")
wake(versions_key, "token", token)
append_event(events_key, "republished",
  cjson.encode({token = token, version = tonumber(redis.call("HGET", round_key, "version"))}))
return 1
