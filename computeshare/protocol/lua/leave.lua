-- leave.lua: end a worker's session and free its leases.
-- Returns the number of micro-batches freed, or -1 if the session is not the worker's current one (nothing is changed).
local round_key, sessions_key, leases_key, backups_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local free_key, versions_key, events_key, audits_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local peers_key = KEYS[9]
local worker = ARGV[1]
local session = ARGV[2] -- *: the worker's current session
local event = ARGV[3] -- JSON object; worker, session and freed micro-batches are added below

local newest = redis.call("HGET", sessions_key, worker)
if not newest or (session ~= "*" and session ~= newest) then return -1 end
if not fields_of(event) then return redis.error_reply("a session's event is a JSON object of at most 64 KiB") end
local data = cjson.decode(event)
data.worker, data.session, data.freed = worker, newest, nil
redis.call("HDEL", sessions_key, worker)
redis.call("HDEL", peers_key, worker) -- nobody averages with one that has gone
local freed = {}
if redis.call("EXISTS", round_key) == 1 then
  freed = free_leases(leases_key, backups_key, audits_key, free_key, newest)
  if #freed > 0 then wake(versions_key, "freed", #freed) end
end
append_event(events_key, "left",
  string.format('{"freed":[%s],%s', table.concat(freed, ","), cjson.encode(data):sub(2)))
return #freed
