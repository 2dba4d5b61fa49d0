-- renew.lua: renew a reducer's claim, or give it up.
-- Returns 1, or 0 if another reducer has the claim (nothing is changed).
local claim_key = KEYS[1]
local holder = ARGV[1] -- the expected value of the claim
local life_ms = ARGV[2] -- 0 gives it up

if redis.call("GET", claim_key) ~= holder then return 0 end
if life_ms == "0" then redis.call("DEL", claim_key) else redis.call("PEXPIRE", claim_key, life_ms) end
return 1
