-- renew.lua: keep a claim that is still one's own.
-- KEYS  1 claim
-- ARGV  1 what the claim must hold   2 life, milliseconds (0 gives it up)
-- Returns 1, or 0 if it is somebody else's by now (nothing is changed).
if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == "0" then redis.call("DEL", KEYS[1]) else redis.call("PEXPIRE", KEYS[1], ARGV[2]) end
return 1
