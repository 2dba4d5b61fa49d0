-- dispute.lua: have a unit computed again. Of one that is suspected (`copied`), another machine of the kind makes a copy,
-- and the update stays; one that a copy contradicts is taken back, so that a third machine decides. For a minute, or
-- eight times as long as a unit usually takes, no party gets the unit if another machine can decide.
-- Returns 1, or 0 if the version or the fence is outdated, or another submission was accepted (nothing is changed).
local round_key, fence_key, received_key, free_key, update_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local copies_key, disputes_key, versions_key, speeds_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local token, fence = ARGV[1], ARGV[2]
local micro_batch, nonce = ARGV[3], ARGV[4] -- of the update
local parties = ARGV[5] -- JSON object: the workers, each with the digest of what it sent
local copied = ARGV[6] -- 1 or 0

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
local entry = redis.call("HGET", received_key, micro_batch)
if not entry or cjson.decode(entry).nonce ~= nonce then return 0 end
local SHORTEST_MS, UNITS = 60000, 8
local speeds = {}
for _, told in ipairs(redis.call("HVALS", speeds_key)) do
  speeds[#speeds + 1] = tonumber(told:match("^[^|]+"))
end
table.sort(speeds)
local patience = math.max(SHORTEST_MS, UNITS * (speeds[math.ceil(#speeds / 2)] or 0))
redis.call("HSET", disputes_key, micro_batch, string.format('{"ends":%.0f,"copied":%s,"parties":%s}',
  now_ms() + patience, tostring(copied == "1"), parties))
if copied == "0" then
  redis.call("HDEL", received_key, micro_batch)
  redis.call("HDEL", copies_key, micro_batch)
  redis.call("UNLINK", update_key, update_key .. ":copy") -- JobKeys.copy
  redis.call("HDEL", round_key, "closed")
  redis.call("RPUSH", free_key, micro_batch)
end
wake(versions_key, "freed", 1)
return 1
