-- doubt.lua: tell that a worker read weights of the current version that do not match the digest in its token; it hands
-- its leases back. Where reading them again gave the same, the reducer is asked to publish the version again.
-- KEYS  1 round   2 sessions   3 leases   4 backups   5 free   6 full   7 events
-- ARGV  1 token   2 worker   3 session   4 whether it is the second time in a row (1 or 0)
-- Returns 1, or 0 if the version has moved on, or the session is not the worker's any more (nothing is changed).
if redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3] then return 0 end
for i = 3, 4 do
  local held = redis.call("HGETALL", KEYS[i])
  for j = 1, #held, 2 do
    if held[j + 1]:match("^[^|]*") == ARGV[3] then
      redis.call("HDEL", KEYS[i], held[j])
      if i == 3 then redis.call("RPUSH", KEYS[5], held[j]) end
    end
  end
end
if redis.call("HGET", KEYS[1], "doubted") == ARGV[1] then return 1 end -- told, and the reducer is at it
if ARGV[4] == "1" then
  redis.call("HSET", KEYS[1], "doubted", ARGV[1])
  redis.call("RPUSH", KEYS[6], ARGV[1])
end
local now = redis.call("TIME")
redis.call("XADD", KEYS[7], "*", "type", "doubted", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data",
  cjson.encode({token = ARGV[1], version = tonumber(redis.call("HGET", KEYS[1], "version")), worker = ARGV[2]}))
return 1
