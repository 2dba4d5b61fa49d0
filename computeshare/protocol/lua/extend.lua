-- extend.lua: extend a session's leases and the life of its staged updates. A lease is extended until it is six hours old,
-- or as old as 40 units take this worker (ten first lengths), if that is longer.
-- Returns the job's status; `lost` if the job is running, but the session has no lease on any of the micro-batches,
-- because other workers were faster; `gone` if the job is not open; `fenced` if the worker has a newer session (in the
-- last two cases, nothing is changed).
local round_key, sessions_key, leases_key, backups_key, audits_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local speeds_key = KEYS[6]
local staged_keys = slice(KEYS, 7)
local worker, session = ARGV[1], ARGV[2]
local least_ms = tonumber(ARGV[3]) -- remaining time of each lease, at least
local staged_s = ARGV[4] -- remaining time of the staged messages
local micro_batches = slice(ARGV, 5)

local status = redis.call("HGET", round_key, "status")
if not status then return "gone" end
if redis.call("HGET", sessions_key, worker) ~= session then return "fenced" end
local OLDEST_MS, OLDEST_UNITS = 6 * 3600 * 1000, 40
local each = tonumber((redis.call("HGET", speeds_key, worker) or ""):match("^[^|]+")) or 0
local now = now_ms()
local least, begun = now + least_ms, now - math.max(OLDEST_MS, OLDEST_UNITS * each)
local lost = status == "running" and #micro_batches > 0
for _, key in ipairs({leases_key, backups_key, audits_key}) do
  for _, micro_batch in ipairs(micro_batches) do
    local holder, expires, since = (redis.call("HGET", key, micro_batch) or "||"):match("^(.-)|(.-)|(.*)$")
    if holder == session then
      lost = false
      if tonumber(expires) < least and tonumber(since:match("^%d+")) > begun then
        redis.call("HSET", key, micro_batch, string.format("%s|%.0f|%s", holder, least, since))
      end
    end
  end
end
for _, key in ipairs(staged_keys) do redis.call("EXPIRE", key, staged_s) end
return lost and "lost" or status
