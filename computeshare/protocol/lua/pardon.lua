-- pardon.lua: lift the ban of a worker, and of all workers of its machine, from a job, and clear the machine's strikes.
-- Returns 1, or 0 if it was not banned or the job is gone (nothing is changed).
local spec_key, banned_key, strikes_key, events_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker = ARGV[1]

if redis.call("EXISTS", spec_key) == 0 then return 0 end
local lifted = 0
for _, banned in ipairs(redis.call("HKEYS", banned_key)) do
  if machine_of(banned) == machine_of(worker) then
    lifted = lifted + redis.call("HDEL", banned_key, banned)
  end
end
if lifted == 0 then return 0 end
redis.call("HDEL", strikes_key, machine_of(worker))
append_event(events_key, "unbanned", cjson.encode({worker = worker}))
return 1
