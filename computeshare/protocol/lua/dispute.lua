-- dispute.lua: take back an update that a copy by another machine contradicts, so that a third machine decides.
-- Returns 1, or 0 if the version or the fence is outdated, or another submission was accepted (nothing is changed).
local round_key, fence_key, received_key, free_key, update_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local copies_key, disputes_key, versions_key = KEYS[6], KEYS[7], KEYS[8]
local token, fence = ARGV[1], ARGV[2]
local micro_batch, nonce = ARGV[3], ARGV[4] -- of the update
local parties = ARGV[5] -- JSON object: both workers, each with the digest of what it sent

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
local entry = redis.call("HGET", received_key, micro_batch)
if not entry or cjson.decode(entry).nonce ~= nonce then return 0 end
redis.call("HDEL", received_key, micro_batch)
redis.call("HDEL", copies_key, micro_batch)
redis.call("UNLINK", update_key, update_key .. ":copy") -- JobKeys.copy
redis.call("HSET", disputes_key, micro_batch, parties)
redis.call("HDEL", round_key, "closed")
redis.call("RPUSH", free_key, micro_batch)
wake(versions_key, "freed", 1)
return 1
