-- announce.lua: append an event to a job that still exists, if the sender's fence (where it has one) still holds.
-- KEYS  1 spec   2 fence   3 events
-- ARGV  1 fence, or empty   2 type   3 event (JSON)
-- Returns 1, or 0 if the job is gone or the fence had moved on (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
if ARGV[1] ~= "" and redis.call("GET", KEYS[2]) ~= ARGV[1] then return 0 end
local now = redis.call("TIME")
redis.call("XADD", KEYS[3], "*", "type", ARGV[2], "at", now[1] * 1000 + math.floor(now[2] / 1000), "data", ARGV[3])
return 1
