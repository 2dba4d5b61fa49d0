-- keep.lua: keep a staged state under its name and drop what it could have been recomputed from.
-- KEYS  1 fence   2 round   3 staged state   4 state   then the keys to drop
-- ARGV  1 this reducer's fence   2 token of the state
-- Returns 1, or 0 if the version or the fence had moved on or the job is gone (only the staged state goes).
if redis.call("GET", KEYS[1]) ~= ARGV[1] or redis.call("HGET", KEYS[2], "token") ~= ARGV[2] then
  redis.call("UNLINK", KEYS[3])
  return 0
end
redis.call("RENAME", KEYS[3], KEYS[4]) -- first write: raises, with no effect, if the staging expired
redis.call("PERSIST", KEYS[4])
for i = 5, #KEYS do redis.call("UNLINK", KEYS[i]) end
return 1
