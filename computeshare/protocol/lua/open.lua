-- open.lua: publish a job's first weights, initial or restored, unless it is open already.
-- KEYS  1 round   2 fence   3 staged weights   4 weights   5 staged state   6 state   7 versions   8 events   9 spec
--       10 free   11 recent   12 chain
-- ARGV  1 this reducer's fence   2 token   3 version   4 first micro-batch   5 count
--       6 event (JSON)   7 micro-batches carried into this round, by commas   8 how many leases it gives out in all (0 if all rounds are done)
--       9 how many of them make the next version   10 from how many versions, the current one among them, updates count
--       then the terms of the job's leases and submissions, each a name and a value
-- Returns 1 if opened, 0 if the job is open or gone or the fence had moved on (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 1 or redis.call("EXISTS", KEYS[9]) == 0 then return 0 end
if redis.call("GET", KEYS[2]) ~= ARGV[1] then return 0 end
redis.call("RENAME", KEYS[3], KEYS[4]) -- first write: raises, with no effect, if the staging expired
redis.call("PERSIST", KEYS[4])
redis.call("RENAME", KEYS[5], KEYS[6])
redis.call("PERSIST", KEYS[6])
local now = redis.call("TIME")
redis.call("HSET", KEYS[1], "status", ARGV[8] == "0" and "finished" or "running", "token", ARGV[2], "base", "", "version", ARGV[3],
  "first", ARGV[4], "count", ARGV[5], "carried", ARGV[7], "total", ARGV[8], "cursor", "0", "needed", ARGV[9],
  "recent", ARGV[10], "snapshot", ARGV[2], "opened", now[1] * 1000 + math.floor(now[2] / 1000))
for i = 11, #ARGV, 2 do redis.call("HSET", KEYS[1], ARGV[i], ARGV[i + 1]) end
for micro_batch in ARGV[7]:gmatch("%d+") do redis.call("RPUSH", KEYS[10], micro_batch) end
redis.call("DEL", KEYS[11], KEYS[12])
redis.call("LPUSH", KEYS[11], ARGV[2])
redis.call("RPUSH", KEYS[12], ARGV[2])
redis.call("XADD", KEYS[7], "MAXLEN", "16", "*", "token", ARGV[2])
redis.call("XADD", KEYS[8], "*", "type", "opened", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data", ARGV[6])
return 1
