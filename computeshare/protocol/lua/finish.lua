-- finish.lua: end a job's rounds and wake all its waiting workers.
-- Returns 1, or 0 if the job is not open (nothing is changed).
local round_key, versions_key = KEYS[1], KEYS[2]
local status = ARGV[1]

if redis.call("EXISTS", round_key) == 0 then return 0 end
redis.call("HSET", round_key, "status", status)
wake(versions_key, "status", status)
return 1
