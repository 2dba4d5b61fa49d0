-- finish.lua: stop a job's rounds for good and wake everyone who waits on it.
-- KEYS  1 round   2 versions
-- ARGV  1 status
-- Returns 1, or 0 if the job is not open (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
redis.call("HSET", KEYS[1], "status", ARGV[1])
redis.call("XADD", KEYS[2], "MAXLEN", "16", "*", "status", ARGV[1])
return 1
