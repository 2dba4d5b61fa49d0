-- extend.lua: keep leases, and what has been staged of their updates, for as long as their session works on them.
-- KEYS  1 round   2 sessions   3 leases   4 backups   then the staged messages
-- ARGV  1 worker   2 session   3 least time that the leases have left from now on, milliseconds
--       4 life of the staged messages from now on, seconds   then the micro-batches
-- Returns the job's status; `lost` if that is running, but the session has no lease on any of the micro-batches: others
-- were faster; `gone` if it is not open, or `fenced` if the session is not the worker's any more (nothing is changed in
-- these two cases).
local status = redis.call("HGET", KEYS[1], "status")
if not status then return "gone" end
if redis.call("HGET", KEYS[2], ARGV[1]) ~= ARGV[2] then return "fenced" end
local clock = redis.call("TIME")
local least = clock[1] * 1000 + math.floor(clock[2] / 1000) + tonumber(ARGV[3])
local lost = status == "running" and #ARGV > 4
for i = 3, 4 do
  for j = 5, #ARGV do
    local session, expires, rest = (redis.call("HGET", KEYS[i], ARGV[j]) or "||"):match("^(.-)|(.-)|(.*)$")
    if session == ARGV[2] then
      lost = false
      if tonumber(expires) < least then
        redis.call("HSET", KEYS[i], ARGV[j], string.format("%s|%.0f|%s", session, least, rest))
      end
    end
  end
end
for i = 5, #KEYS do redis.call("EXPIRE", KEYS[i], ARGV[4]) end
return lost and "lost" or status
