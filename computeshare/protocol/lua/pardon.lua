-- pardon.lua: let a banned worker join a job again, its strikes forgotten.
-- KEYS  1 spec   2 banned   3 strikes   4 events
-- ARGV  1 worker
-- Returns 1, or 0 if it was not banned or the job is gone (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 or redis.call("HDEL", KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call("HDEL", KEYS[3], ARGV[1])
local now = redis.call("TIME")
redis.call("XADD", KEYS[4], "*", "type", "unbanned", "at", now[1] * 1000 + math.floor(now[2] / 1000),
  "data", cjson.encode({worker = ARGV[1]}))
return 1
