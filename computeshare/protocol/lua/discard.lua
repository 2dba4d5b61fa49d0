-- discard.lua: give up a round that the broker went back to, or that cannot be, so that the job is restored.
-- KEYS  1 round   2 fence   then what belongs to the round
-- ARGV  1 token, or empty where it has none   2 this reducer's fence
-- Returns 1, or 0 if the version or the fence had moved on (nothing is changed).
if (redis.call("HGET", KEYS[1], "token") or "") ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[2] then return 0 end
redis.call("DEL", KEYS[1])
for i = 3, #KEYS do redis.call("UNLINK", KEYS[i]) end
return 1
