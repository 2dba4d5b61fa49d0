-- claim.lua: become the active reducer of a job that has none, under a new fence: one more than the last, and no less
-- than the clock (in microseconds), so that it grows even after the broker lost everything.
-- KEYS  1 spec   2 reducer   3 fence   4 events
-- ARGV  1 host|pid|id of this reducer   2 life of the claim, milliseconds   3 host   4 pid
-- Returns the fence, or 0 if another reducer is active or the job is gone. Nothing is changed then, except that a claim
-- lasts no longer from now than a life: it would if the broker's clock was set back.
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
if redis.call("EXISTS", KEYS[2]) == 1 then
  redis.call("PEXPIRE", KEYS[2], ARGV[2], "LT")
  return 0
end
local now = redis.call("TIME")
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local fence = math.max((tonumber(redis.call("GET", KEYS[3])) or 0) + 1, now[1] * 1000000 + now[2])
redis.call("SET", KEYS[3], string.format("%.0f", fence))
redis.call("SET", KEYS[2], string.format("%.0f|%s", fence, ARGV[1]), "PX", ARGV[2])
redis.call("XADD", KEYS[4], "*", "type", "reducer", "at", at,
  "data", string.format('{"fence":%.0f,%s', fence, cjson.encode({host = ARGV[3], pid = tonumber(ARGV[4])}):sub(2)))
return fence
