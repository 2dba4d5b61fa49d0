-- place.lua: note that a session is there to hold stages of a job's model, and what it can do; and store a placement of
-- the stages, if it was made for exactly the sessions that are there, and replaces the current placement.
-- A session that listens on its channel, and has not been seen for `LOST_MS`, is there as long as the broker counts a
-- listener: the system of a process that ends closes its connections at once. Of one whose connection stays, or that
-- does not listen, it is known after `LIFE_MS`. The leases of a session that is not there any more are freed; it takes
-- part again as soon as it is seen. No caller chooses these times or the channels, by which others lose their leases.
-- Returns {status of the job, number of the placement (0: there is none), its plan, the sessions that are there, their
-- entries}: sessions as `WORKER:SESSION`, ascending, separated by spaces. Status is `gone` if the job is not open,
-- `fenced` if the worker has a newer session (nothing is changed).
local round_key, sessions_key, members_key = KEYS[1], KEYS[2], KEYS[3]
local placement_key, versions_key, events_key = KEYS[4], KEYS[5], KEYS[6]
local leases_key, backups_key, audits_key, free_key = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local worker, session = ARGV[1], ARGV[2]
local about = ARGV[3] -- JSON object; "listens":true if the sender listens on its channel
local number = ARGV[4] -- of the placement that `plan` replaces
local present, plan = ARGV[5], ARGV[6] -- the sessions it was made for; JSON object; both empty: none is proposed

local channels = job_of(members_key) .. ":here:" -- the names of the job's channels, without the session
local LIFE_MS = 5000
local LOST_MS = 600 -- time to connect again
local status = redis.call("HGET", round_key, "status")
if not status then return {"gone", 0, "", "", {}} end
if redis.call("HGET", sessions_key, worker) ~= session then return {"fenced", 0, "", "", {}} end
if not fields_of(about) or (plan ~= "" and not fields_of(plan)) then
  return redis.error_reply("what a worker says of itself, and a plan, are JSON objects of at most 64 KiB")
end
local now = now_ms()
redis.call("HSET", members_key, worker, string.format("%s|%.0f|%s", session, now, about))

local function is_there(its_session, unseen_ms, its_about)
  if unseen_ms >= LIFE_MS then return false end
  if unseen_ms < LOST_MS or not its_about:find('"listens":true', 1, true) then return true end
  return tonumber(redis.call("PUBSUB", "NUMSUB", channels .. its_session)[2]) > 0
end

local there, here, entries, freed = {}, {}, {}, 0
local members = redis.call("HKEYS", members_key)
table.sort(members)
for _, member in ipairs(members) do
  local its_session, seen, its_about = redis.call("HGET", members_key, member):match("^(.-)|(%d+)|(.*)$")
  local is_newest = redis.call("HGET", sessions_key, member) == its_session
  if is_newest and is_there(its_session, now - tonumber(seen), its_about) then
    there[#there + 1], here[#here + 1], entries[#entries + 1] = member .. ":" .. its_session, its_session, its_about
  else
    redis.call("HDEL", members_key, member)
    if is_newest then freed = freed + #free_leases(leases_key, backups_key, audits_key, free_key, its_session) end
  end
end
if freed > 0 then wake(versions_key, "freed", freed) end
there = table.concat(there, " ")
local current = redis.call("HGET", placement_key, "number") or "0"
if plan ~= "" and current == number and there == present then
  current = redis.call("HINCRBY", placement_key, "number", 1)
  redis.call("HSET", placement_key, "plan", plan)
  wake(versions_key, "placed", current)
  for _, one in ipairs(here) do redis.call("PUBLISH", channels .. one, "placed") end
  append_event(events_key, "placed", object_of(string.format('"number":%d', current), fields_of(plan)))
end
return {status, tonumber(current), redis.call("HGET", placement_key, "plan") or "", there, entries}
