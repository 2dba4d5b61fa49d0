-- pause.lua: pause a job's rounds and wake all its waiting workers; accepted updates stay.
-- Returns 1, or 0 if the rounds are not running (nothing is changed).
local round_key, versions_key = KEYS[1], KEYS[2]

if redis.call("HGET", round_key, "status") ~= "running" then return 0 end
redis.call("HSET", round_key, "status", "paused")
wake(versions_key, "status", "paused")
return 1
