-- republish.lua: put a reducer's own copy of the current version in the place of weights that workers found damaged.
-- KEYS  1 round   2 fence   3 staged weights   4 weights   5 news of the base   6 versions   7 events
-- ARGV  1 token   2 this reducer's fence   3 1 where versions are differences: what is staged is a snapshot then
-- Returns 1, or 0 if the version or the fence had moved on (nothing is changed).
if redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[2] then return 0 end
redis.call("RENAME", KEYS[3], KEYS[4]) -- first write: raises, with no effect, if the staging expired
redis.call("PERSIST", KEYS[4])
redis.call("UNLINK", KEYS[5]) -- they are damaged as well, or may be: whoever waits for them reads the weights
if ARGV[3] == "1" then redis.call("HSET", KEYS[1], "snapshot", ARGV[1]) end
redis.call("HDEL", KEYS[1], "doubted")
local now = redis.call("TIME")
redis.call("XADD", KEYS[6], "MAXLEN", "16", "*", "token", ARGV[1])
redis.call("XADD", KEYS[7], "*", "type", "republished", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data",
  cjson.encode({token = ARGV[1], version = tonumber(redis.call("HGET", KEYS[1], "version"))}))
return 1
