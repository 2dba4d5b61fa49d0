-- pause.lua: hold a job's rounds and wake everyone who waits on it; what was accepted stays.
-- KEYS  1 round   2 versions
-- ARGV  none
-- Returns 1, or 0 if the rounds are not running (nothing is changed).
if redis.call("HGET", KEYS[1], "status") ~= "running" then return 0 end
redis.call("HSET", KEYS[1], "status", "paused")
redis.call("XADD", KEYS[2], "MAXLEN", "16", "*", "status", "paused")
return 1
