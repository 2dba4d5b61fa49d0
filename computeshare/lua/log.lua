-- log.lua: append lines to the log of a job that still exists; of a log that nobody reads the oldest give way.
-- KEYS  1 spec   2 logs
-- ARGV  1 how many are kept, about   2... a line each (JSON)
-- Returns how many were appended, or 0 if the job is gone (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
for i = 2, #ARGV do redis.call("XADD", KEYS[2], "MAXLEN", "~", ARGV[1], "*", "data", ARGV[i]) end
return #ARGV - 1
