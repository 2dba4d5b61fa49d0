-- close.lua: freeze what a round has received, so that it is reduced without the rest.
-- KEYS  1 round   2 fence   3 received   4 events
-- ARGV  1 token   2 this reducer's fence   3 how many micro-batches must have been received
-- Returns 1 if closed, 0 if the version, the fence or the job had moved on, if too few were received, or if it was
-- closed before (nothing is changed). A refusal opens it again.
local round = redis.call("HMGET", KEYS[1], "token", "status", "closed", "version", "total")
if round[1] ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[2] then return 0 end
if round[2] ~= "running" or round[3] then return 0 end
local received = redis.call("HLEN", KEYS[3])
if received < tonumber(ARGV[3]) then return 0 end
redis.call("HSET", KEYS[1], "closed", "1")
local now = redis.call("TIME")
redis.call("XADD", KEYS[4], "*", "type", "closed", "at", now[1] * 1000 + math.floor(now[2] / 1000),
  "data", string.format('{"version":%s,"received":%d,"total":%s}', round[4], received, round[5]))
return 1
