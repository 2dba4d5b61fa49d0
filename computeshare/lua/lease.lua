-- lease.lua: give a worker micro-batches of the current round: free ones, else those whose lease has run out,
-- else a second lease on a slow one (a backup task: the first submission wins). The clock is the server's.
-- A micro-batch is slow once the round is older than its deadline, which the commit before worked out; where it worked out
-- none, once its lease is older than the worker that asks would need for the round, three times over.
-- KEYS  1 round   2 sessions   3 leases   4 backups   5 received   6 free   7 speeds   8 events   9 banned
--       10 suspects   11 news of the version after the token's
-- ARGV  1 token   2 worker   3 session   4 whether the news are read right after this (1 or 0): then the lease is on the
--       version after the token's, where that is the current one and there are news of it
-- The terms stand in the round, where its reducer wrote them: `backup` (1: backup tasks are allowed), `sharers` (fewest
-- workers that may make a round, each of them its share at most; 0: any), `fewest` (sessions there must be),
-- `unmeasured` (most units for a worker that was not measured yet; 0: its share).
-- Where the round has sizes, a unit goes to the worker that its size was made for; to another only once that one is
-- gone, has work of the round already, or is late.
-- Returns {answer, current token, ms until it is worth asking again, sizes of the round's units by commas,
-- micro-batch, ...}; the answer is `leased`, `wait`, `stale`, `fenced`, `banned`, `gone` or the job's status if that is
-- not running. Only `leased` changes anything, and has more than three parts.
local SHORTEST_MS = 2000 -- of a lease
local UNMEASURED_MS = 5000 -- a micro-batch is assumed to take on a worker that was not measured yet
local round = redis.call("HMGET", KEYS[1], "status", "token", "first", "count", "cursor", "version", "opened", "total",
  "closed", "deadline", "needed", "sizes", "owners", "base", "backup", "sharers", "fewest", "unmeasured")
local status, token = round[1], round[2]
local backup, sharers = round[15] == "1", tonumber(round[16])
local fewest, unmeasured = tonumber(round[17]), tonumber(round[18])
if not status then return {"gone", "", 0} end
if status ~= "running" then return {status, token, 0} end
if redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3] then
  return {redis.call("HEXISTS", KEYS[9], ARGV[2]) == 1 and "banned" or "fenced", token, 0}
end
if token ~= ARGV[1] and (ARGV[4] == "0" or round[14] ~= ARGV[1] or redis.call("EXISTS", KEYS[11]) == 0) then
  return {"stale", token, 0}
end
if round[9] or redis.call("HLEN", KEYS[5]) >= tonumber(round[11]) then
  return {"wait", token, 1000} -- closed, or enough is there: the next version is on its way
end

local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local first, count, cursor, total = tonumber(round[3]), tonumber(round[4]), tonumber(round[5]), tonumber(round[8])
local share = math.ceil(tonumber(round[11]) / math.max(1, redis.call("HLEN", KEYS[2])))
local measured = tonumber(redis.call("HGET", KEYS[7], ARGV[2]))
local speed = measured or UNMEASURED_MS
local granted, moved = {}, {}
local again = 4000

if redis.call("HLEN", KEYS[2]) < fewest then return {"wait", token, 1000} end
if sharers > 0 then
  local room = math.ceil(total / sharers)
  for _, entry in ipairs(redis.call("HVALS", KEYS[5])) do
    if cjson.decode(entry).worker == ARGV[2] then room = room - 1 end
  end
  for _, key in ipairs({KEYS[3], KEYS[4]}) do
    for _, held in ipairs(redis.call("HVALS", key)) do
      local expires, worker = held:match("^.-|(.-)|.-|(.*)$")
      if worker == ARGV[2] and tonumber(expires) > now then room = room - 1 end
    end
  end
  share = math.min(share, room)
  if share < 1 then return {"wait", token, 1000} end
end

if not measured and unmeasured > 0 then share = math.min(share, unmeasured) end

local deadline = tonumber(round[10] or 0)
local patience = deadline > 0 and deadline or 250 + 3 * speed * total
local slow = tonumber(round[7]) + patience
local owners, busy = {}, {}
for owner in (round[13] or ""):gmatch("[^,]+") do owners[#owners + 1] = owner end
if #owners > 0 then
  for _, entry in ipairs(redis.call("HVALS", KEYS[5])) do busy[cjson.decode(entry).worker] = true end
  for _, held in ipairs(redis.call("HVALS", KEYS[3])) do busy[held:match("^.-|.-|.-|(.*)$")] = true end
end

local function pick() -- takes one off the free ones; nothing if they are all for others
  if #owners == 0 then return redis.call("LPOP", KEYS[6]) end
  local found
  for _, unit in ipairs(redis.call("LRANGE", KEYS[6], 0, -1)) do
    local owner = owners[tonumber(unit) - first + 1]
    if owner == ARGV[2] then
      found = unit
      break
    elseif not found and (busy[owner] or now > slow or redis.call("HEXISTS", KEYS[2], owner) == 0) then
      found = unit
    end
  end
  if found then redis.call("LREM", KEYS[6], 1, found) else again = 250 end
  return found
end

local others, aside = redis.call("HLEN", KEYS[2]) > 1 and sharers == 0, {}
while #granted < share do
  local freed = pick()
  if freed then
    local suspects = others and cjson.decode(redis.call("HGET", KEYS[10], freed) or "{}")
    if suspects and suspects[ARGV[3]] and not next(suspects, next(suspects)) then
      aside[#aside + 1] = freed -- one of the others is to say whether that is not finite, and none has yet
    else
      granted[#granted + 1] = freed
    end
  elseif cursor < count then
    granted[#granted + 1] = string.format("%d", first + cursor)
    cursor = cursor + 1
  else
    break
  end
end
redis.call("HSET", KEYS[1], "cursor", cursor)
for _, micro_batch in ipairs(aside) do redis.call("RPUSH", KEYS[6], micro_batch) end
if #aside > 0 then again = 500 end

local backups = {}
if #granted == 0 then
  local held = redis.call("HGETALL", KEYS[3])
  for i = 1, #held, 2 do
    local session, expires, leased, worker = held[i + 1]:match("^(.-)|(.-)|(.-)|(.-)$")
    expires, leased = tonumber(expires), tonumber(leased)
    local late = deadline > 0 and slow or leased + patience -- the first weights may take long to arrive
    local take = #granted < share and (expires <= now or (backup and session ~= ARGV[3] and late <= now
      and redis.call("HEXISTS", KEYS[4], held[i]) == 0))
    if take then
      granted[#granted + 1] = held[i]
      backups[held[i]] = expires > now
      moved[#moved + 1] = {from = worker, after_ms = now - leased, micro_batch = tonumber(held[i]), backup = expires > now}
    else
      again = math.min(again, expires - now)
      if backup and session ~= ARGV[3] and redis.call("HEXISTS", KEYS[4], held[i]) == 0 then
        again = math.min(again, late - now)
      end
    end
  end
end
if #granted == 0 then return {"wait", token, math.max(20, math.ceil(again))} end

local life = math.max(SHORTEST_MS, 4 * speed * #granted)
local lease = string.format("%s|%.0f|%.0f|%s", ARGV[3], now + life, now, ARGV[2])
for _, micro_batch in ipairs(granted) do
  redis.call("HSET", backups[micro_batch] and KEYS[4] or KEYS[3], micro_batch, lease)
end
for _, event in ipairs(moved) do
  event.to, event.version = ARGV[2], tonumber(round[6])
  redis.call("XADD", KEYS[8], "*", "type", "reassigned", "at", now, "data", cjson.encode(event))
end
local answer = {"leased", token, math.ceil(life), round[12] or ""}
for _, micro_batch in ipairs(granted) do answer[#answer + 1] = micro_batch end
return answer
