-- pardon.lua: lift a worker's ban from a job and clear its strikes.
-- Returns 1, or 0 if it was not banned or the job is gone (nothing is changed).
local spec_key, banned_key, strikes_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker = ARGV[1]

if redis.call("EXISTS", spec_key) == 0 or redis.call("HDEL", banned_key, worker) == 0 then return 0 end
redis.call("HDEL", strikes_key, worker)
append_event(events_key, "unbanned", cjson.encode({worker = worker}))
return 1
