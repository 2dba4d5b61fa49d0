-- resume.lua: continue a job's paused rounds and wake all its waiting workers.
-- Returns 1, or 0 if the rounds are not paused (nothing is changed).
local round_key, versions_key = KEYS[1], KEYS[2]

if redis.call("HGET", round_key, "status") ~= "paused" then return 0 end
redis.call("HSET", round_key, "status", "running", "opened", now_ms()) -- the pause does not count as waiting time
wake(versions_key, "status", "running")
return 1
