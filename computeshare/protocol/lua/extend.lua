-- extend.lua: keep leases, and what has been staged of their updates, for as long as their session works on them.
-- Returns the job's status; `lost` if that is running, but the session has no lease on any of the micro-batches: others
-- were faster; `gone` if it is not open, or `fenced` if the session is not the worker's any more (nothing is changed in
-- these two cases).
local round_key, sessions_key, leases_key, backups_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local staged_keys = slice(KEYS, 5)
local worker, session = ARGV[1], ARGV[2]
local least_ms = tonumber(ARGV[3]) -- that the leases have left from now on
local staged_s = ARGV[4] -- life of the staged messages from now on
local micro_batches = slice(ARGV, 5)

local status = redis.call("HGET", round_key, "status")
if not status then return "gone" end
if redis.call("HGET", sessions_key, worker) ~= session then return "fenced" end
local least = now_ms() + least_ms
local lost = status == "running" and #micro_batches > 0
for _, key in ipairs({leases_key, backups_key}) do
  for _, micro_batch in ipairs(micro_batches) do
    local holder, expires, since = (redis.call("HGET", key, micro_batch) or "||"):match("^(.-)|(.-)|(.*)$")
    if holder == session then
      lost = false
      if tonumber(expires) < least then
        redis.call("HSET", key, micro_batch, string.format("%s|%.0f|%s", holder, least, since))
      end
    end
  end
end
for _, key in ipairs(staged_keys) do redis.call("EXPIRE", key, staged_s) end
return lost and "lost" or status
