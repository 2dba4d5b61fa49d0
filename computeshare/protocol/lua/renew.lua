-- renew.lua: keep a claim that is still one's own.
-- Returns 1, or 0 if it is somebody else's by now (nothing is changed).
local claim_key = KEYS[1]
local holder = ARGV[1] -- what the claim must hold
local life_ms = ARGV[2] -- 0 gives it up

if redis.call("GET", claim_key) ~= holder then return 0 end
if life_ms == "0" then redis.call("DEL", claim_key) else redis.call("PEXPIRE", claim_key, life_ms) end
return 1
