-- claim.lua: become the active reducer of a job without one, under a new fence. The new fence is larger than the last
-- one and at least the clock in microseconds, so that fences grow even after the broker lost everything.
-- Returns the fence, or 0 if another reducer is active or the job is gone. Then nothing is changed, except that the
-- other claim's remaining time is cut to `life_ms`, which it exceeds if the broker's clock was set back.
local spec_key, reducer_key, fence_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local identity = ARGV[1] -- host|pid|id of this reducer
local life_ms = ARGV[2] -- duration of the claim
local host, pid = ARGV[3], tonumber(ARGV[4])

if redis.call("EXISTS", spec_key) == 0 then return 0 end
if redis.call("EXISTS", reducer_key) == 1 then
  redis.call("PEXPIRE", reducer_key, life_ms, "LT")
  return 0
end
local clock = redis.call("TIME")
local fence = math.max((tonumber(redis.call("GET", fence_key)) or 0) + 1, clock[1] * 1000000 + clock[2])
redis.call("SET", fence_key, string.format("%.0f", fence))
redis.call("SET", reducer_key, string.format("%.0f|%s", fence, identity), "PX", life_ms)
append_event(events_key, "reducer",
  string.format('{"fence":%.0f,%s', fence, cjson.encode({host = host, pid = pid}):sub(2)))
return fence
