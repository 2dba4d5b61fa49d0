-- resume.lua: let a job's paused rounds go on, and wake everyone who waits on it.
-- KEYS  1 round   2 versions
-- ARGV  none
-- Returns 1, or 0 if the rounds are not paused (nothing is changed).
if redis.call("HGET", KEYS[1], "status") ~= "paused" then return 0 end
local now = redis.call("TIME") -- what was paused does not count as waiting
redis.call("HSET", KEYS[1], "status", "running", "opened", now[1] * 1000 + math.floor(now[2] / 1000))
redis.call("XADD", KEYS[2], "MAXLEN", "16", "*", "status", "running")
return 1
