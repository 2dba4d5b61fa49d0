-- take_over.lua: take an inner state that a session has handed over, so that no other worker gets it.
-- Returns 1, or 0 if another worker was faster or the state has expired.
local handed_key, handed_inner_key, inner_key = KEYS[1], KEYS[2], KEYS[3]
local session = ARGV[1] -- of the worker that handed the state over

if redis.call("LREM", handed_key, 0, session) == 0 then return 0 end
if redis.call("EXISTS", handed_inner_key) == 0 then return 0 end
redis.call("RENAME", handed_inner_key, inner_key)
return 1
