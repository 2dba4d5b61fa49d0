-- close.lua: close a round, so that it is reduced with the micro-batches received so far.
-- Returns 1 if closed; 0 if the version or the fence is outdated, the job is not running, too few micro-batches were
-- received, or the round was closed before (nothing is changed). A refusal reopens the round.
local round_key, fence_key, received_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, fence = ARGV[1], ARGV[2]
local at_least = tonumber(ARGV[3]) -- micro-batches that must have been received

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
local status, closed, version, total = unpack(redis.call("HMGET", round_key, "status", "closed", "version", "total"))
if status ~= "running" or closed then return 0 end
local received = redis.call("HLEN", received_key)
if received < at_least then return 0 end
redis.call("HSET", round_key, "closed", "1")
append_event(events_key, "closed", string.format('{"version":%s,"received":%d,"total":%s}', version, received, total))
return 1
