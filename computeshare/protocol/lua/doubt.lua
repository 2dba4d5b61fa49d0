-- doubt.lua: report that a worker read weights of the current version that do not match the digest in the token; the
-- worker's leases are handed back. After a second mismatch, the reducer is asked to publish the version again: by each
-- worker once, so that nobody has it publish without end. With `delay`, the same holds for the version before, on which
-- the round's units are computed; the reducer then opens the job again.
-- Returns 1, or 0 if the version is outdated or the worker has a newer session (nothing is changed).
local round_key, sessions_key, leases_key, backups_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local free_key, full_key, events_key, audits_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local token, worker, session = ARGV[1], ARGV[2], ARGV[3]
local again = ARGV[4] -- 1 after the second mismatch in a row; else 0

local current, base, delay = unpack(redis.call("HMGET", round_key, "token", "base", "delay"))
if current ~= token and not (delay == "1" and base == token) then return 0 end
if redis.call("HGET", sessions_key, worker) ~= session then return 0 end
free_leases(leases_key, backups_key, audits_key, free_key, session)
if redis.call("HGET", round_key, "doubted") == token then return 1 end -- the reducer has been asked already
local doubters, mark = redis.call("HGET", round_key, "doubters") or "", string.format("|%s%s|", again, worker)
if doubters:find(mark, 1, true) then return 1 end
redis.call("HSET", round_key, "doubters", doubters .. mark)
if again == "1" then
  redis.call("HSET", round_key, "doubted", token)
  wake_reducer(full_key, token)
end
append_event(events_key, "doubted",
  cjson.encode({token = token, version = tonumber(token:match("%.(%d+)%.")), worker = worker}))
return 1
