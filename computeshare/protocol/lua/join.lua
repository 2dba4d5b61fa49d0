-- join.lua: begin a worker's session in a job. An older session of the worker is fenced and its leases are freed, with
-- an event.
-- Returns {status, last id of the stream `versions`}. Without any change, status is `unopened` (the job is not open),
-- `fenced` (this seat is not the worker's current seat), `banned` (a worker of its machine is), `unlike` (its
-- untrained parameters are not the job's) or `altered` (the job has audits, and the worker joined it before as a machine
-- of another kind).
local round_key, sessions_key, leases_key, backups_key, free_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local versions_key, events_key, kinds_key, audits_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local worker, session, seat = ARGV[1], ARGV[2], ARGV[3]
local event = ARGV[4] -- JSON object: the worker's description of itself
local frozen = ARGV[5] -- digest of the parameters that are not trained; empty without any
local seats_key, banned_key = job_of(round_key) .. ":seats", job_of(round_key) .. ":banned"

local said = fields_of(event)
if not said then return redis.error_reply("a session's event is a JSON object of at most 64 KiB") end
if #session > LONGEST_NAME then return redis.error_reply("a session's id has at most 100 characters") end
local status = redis.call("HGET", round_key, "status")
local last = redis.call("XREVRANGE", versions_key, "+", "-", "COUNT", 1)
last = last[1] and last[1][1] or "0-0"
if not status then return {"unopened", last} end
if redis.call("HGET", seats_key, worker) ~= seat then return {"fenced", last} end
if status ~= "running" then return {status, last} end
for _, banned in ipairs(redis.call("HKEYS", banned_key)) do
  if machine_of(banned) == machine_of(worker) then return {"banned", last} end
end
if (redis.call("HGET", round_key, "frozen") or "") ~= frozen then return {"unlike", last} end
local function kind_of(about) -- one text for machines that compute the same bits
  local kind = {}
  for name, value in pairs(type(about.kind) == "table" and about.kind or {}) do
    kind[#kind + 1] = cjson.encode({name, value})
  end
  table.sort(kind)
  return redis.sha1hex(table.concat(kind))
end
local kind, before = kind_of(cjson.decode(event)), redis.call("HGET", kinds_key, worker)
local audit = tonumber(redis.call("HGET", round_key, "audit") or "0")
if audit > 0 and before and before ~= kind then return {"altered", last} end
local former = redis.call("HGET", sessions_key, worker)
if former then
  local freed = free_leases(leases_key, backups_key, audits_key, free_key, former)
  if #freed > 0 then
    local about = cjson.encode({worker = worker, session = former, reason = "a newer session has taken over"})
    append_event(events_key, "left", string.format('{"freed":[%s],%s', table.concat(freed, ","), about:sub(2)))
    wake(versions_key, "freed", #freed)
  end
end
redis.call("HSET", kinds_key, worker, kind)
redis.call("HSET", sessions_key, worker, session)
append_event(events_key, "joined", object_of(said, string.format('"worker":%s,"session":%s,"seat":%s',
  cjson.encode(worker), cjson.encode(session), cjson.encode(seat))))
return {status, last}
