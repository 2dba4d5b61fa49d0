-- commit.lua: publish the next version, unless the version or the fence has moved on.
-- KEYS  1 round   2 fence   3 staged weights   4 next weights   5 weights before the base's   6 leases   7 backups
--       8 received   9 free   10 suspects   11 versions   12 events   13 full
-- ARGV  1 token the round started from   2 next token   3 this reducer's fence   4 next version
--       5 next round's first micro-batch   6 its count (0 after the last round)   7 event (JSON)
-- Returns 1 if published, 0 if the version, the fence or the job had moved on (nothing is changed).
if redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[3] then return 0 end
local status = redis.call("HGET", KEYS[1], "status")
if status ~= "running" and status ~= "paused" then return 0 end
redis.call("RENAME", KEYS[3], KEYS[4]) -- first write: raises, with no effect, if the staging expired
redis.call("PERSIST", KEYS[4])
local now = redis.call("TIME")
redis.call("HSET", KEYS[1], "token", ARGV[2], "base", ARGV[1], "version", ARGV[4], "first", ARGV[5], "count", ARGV[6],
  "cursor", "0", "opened", now[1] * 1000 + math.floor(now[2] / 1000))
if ARGV[6] == "0" then redis.call("HSET", KEYS[1], "status", "finished") end
redis.call("DEL", KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[13])
redis.call("UNLINK", KEYS[5])
redis.call("XADD", KEYS[11], "MAXLEN", "16", "*", "token", ARGV[2])
redis.call("XADD", KEYS[12], "*", "type", "version", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data", ARGV[7])
return 1
