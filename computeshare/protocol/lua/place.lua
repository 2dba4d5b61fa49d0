-- place.lua: note that a session is there to hold stages of a job's model, and what it can do; and store a placement of
-- the stages, if it was made for exactly the sessions that are there, and replaces the current placement.
-- Returns {status of the job, number of the placement (0: there is none), its plan, the sessions that are there, their
-- entries}: sessions as `WORKER:SESSION`, ascending, separated by spaces. Status is `gone` if the job is not open,
-- `fenced` if the worker has a newer session (nothing is changed).
local round_key, sessions_key, members_key = KEYS[1], KEYS[2], KEYS[3]
local placement_key, versions_key, events_key = KEYS[4], KEYS[5], KEYS[6]
local worker, session = ARGV[1], ARGV[2]
local about = ARGV[3] -- JSON object
local life_ms = tonumber(ARGV[4]) -- a session that was not seen for so long has gone
local number = ARGV[5] -- of the placement that `plan` replaces
local present, plan = ARGV[6], ARGV[7] -- the sessions it was made for; JSON object; both empty: none is proposed

local status = redis.call("HGET", round_key, "status")
if not status then return {"gone", 0, "", "", {}} end
if redis.call("HGET", sessions_key, worker) ~= session then return {"fenced", 0, "", "", {}} end
if not fields_of(about) or (plan ~= "" and not fields_of(plan)) then
  return redis.error_reply("what a worker says of itself, and a plan, are JSON objects of at most 64 KiB")
end
local now = now_ms()
redis.call("HSET", members_key, worker, string.format("%s|%.0f|%s", session, now, about))
local there, entries = {}, {}
local members = redis.call("HKEYS", members_key)
table.sort(members)
for _, member in ipairs(members) do
  local entry = redis.call("HGET", members_key, member)
  local its_session, seen = entry:match("^(.-)|(%d+)|")
  if redis.call("HGET", sessions_key, member) == its_session and tonumber(seen) > now - life_ms then
    there[#there + 1] = member .. ":" .. its_session
    entries[#entries + 1] = entry:match("^.-|%d+|(.*)$")
  else
    redis.call("HDEL", members_key, member)
  end
end
there = table.concat(there, " ")
local current = redis.call("HGET", placement_key, "number") or "0"
if plan ~= "" and current == number and there == present then
  current = redis.call("HINCRBY", placement_key, "number", 1)
  redis.call("HSET", placement_key, "plan", plan)
  wake(versions_key, "placed", current)
  append_event(events_key, "placed", object_of(string.format('"number":%d', current), fields_of(plan)))
end
return {status, tonumber(current), redis.call("HGET", placement_key, "plan") or "", there, entries}
