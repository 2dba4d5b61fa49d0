-- keep.lua: keep a staged state under its name and drop what it could have been recomputed from.
-- KEYS  1 spec   2 staged state   3 state   then the keys to drop
-- Returns 1, or 0 if the job is gone (nothing is changed).
if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end
redis.call("RENAME", KEYS[2], KEYS[3]) -- first write: raises, with no effect, if the staging expired
redis.call("PERSIST", KEYS[3])
for i = 4, #KEYS do redis.call("UNLINK", KEYS[i]) end
return 1
