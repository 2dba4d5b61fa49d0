-- log.lua: append lines to the log of a job that still exists. If nobody reads the log, the oldest lines are dropped.
-- Lines above the limit of `computeshare/protocol/limits.py` are left out.
-- Returns how many lines were given, or 0 if the job is gone (nothing is changed).
local logs_key = KEYS[1]
local kept, kept_bytes = ARGV[1], tonumber(ARGV[2]) -- about how many lines, and bytes of lines, to keep
local lines = slice(ARGV, 3) -- JSON
local spec_key = job_of(logs_key) .. ":spec"

if redis.call("EXISTS", spec_key) == 0 then return 0 end
local LONGEST_LINE = 200000 -- bytes
for _, line in ipairs(lines) do
  if #line <= LONGEST_LINE then redis.call("XADD", logs_key, "MAXLEN", "~", kept, "*", "data", line) end
end
while (redis.call("MEMORY", "USAGE", logs_key, "SAMPLES", 0) or 0) > kept_bytes do
  redis.call("XTRIM", logs_key, "MAXLEN", math.floor(redis.call("XLEN", logs_key) * 3 / 4))
end
return #lines
