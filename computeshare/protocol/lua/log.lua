-- log.lua: append lines to the log of a job that still exists; of a log that nobody reads the oldest give way.
-- KEYS  1 spec   2 logs
-- ARGV  1 how many are kept, about   2 how many bytes they may take, about   3... a line each (JSON)
-- Returns how many were appended, or 0 if the job is gone (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
for i = 3, #ARGV do redis.call("XADD", KEYS[2], "MAXLEN", "~", ARGV[1], "*", "data", ARGV[i]) end
while (redis.call("MEMORY", "USAGE", KEYS[2], "SAMPLES", 0) or 0) > tonumber(ARGV[2]) do
  redis.call("XTRIM", KEYS[2], "MAXLEN", math.floor(redis.call("XLEN", KEYS[2]) * 3 / 4))
end
return #ARGV - 2
