-- announce.lua: append an event to a job that still exists, if the given fence is still the newest.
-- Returns 1, or 0 if the job is gone or the fence is outdated (nothing is changed).
local events_key = KEYS[1]
local fence = ARGV[1] -- empty: not checked
local kind, event = ARGV[2], ARGV[3] -- the event is JSON
local spec_key, fence_key = job_of(events_key) .. ":spec", job_of(events_key) .. ":fence"

if redis.call("EXISTS", spec_key) == 0 then return 0 end
if fence ~= "" and redis.call("GET", fence_key) ~= fence then return 0 end
append_event(events_key, kind, event)
return 1
