-- lease.lua: lease micro-batches of the current round to a worker. In this order: free micro-batches, micro-batches
-- whose lease has expired, and a second lease on what a slow worker holds (a backup: the first submission wins).
-- All times are by the server's clock.
-- If the round needs all of its units, measured speeds decide, as in `computeshare/protocol/lease_policy.py`: a worker
-- gets a unit only if the other workers could not finish all remaining units sooner. A backup begins only if it should
-- finish well before the lease that it doubles.
-- The reducer wrote the terms into the round: `backup` (1: backups are allowed), `sharers` (machines that must share a
-- version, none with more than an equal share; 0: no limit), `fewest` (sessions that must exist; with `sharers`, on as
-- many machines), `unmeasured` (maximum units for a worker of unknown speed; 0: its share), `audit` (share of units that
-- a second machine of the same kind computes as well: a worker cannot tell such a copy from its own units, and `secret`,
-- which no worker knows, decides which units these are), `peers` (1: a worker publishes its weights after each unit, so
-- it gets one at a time), `singles` (1: leases are single units whatever a worker's speed, which is that of a chain).
-- Returns {answer, current token, ms until the next request makes sense, micro-batch, ...}. The answer is `leased`,
-- `wait`, `stale` (another version is current), `fenced`, `banned`, `gone` (the job is not open), or the job's status
-- if it is not running. Only `leased` changes anything and returns micro-batches.
local round_key, sessions_key, leases_key, backups_key, received_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local free_key, speeds_key, events_key, banned_key, suspects_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local news_key = KEYS[11] -- of the version after the token's
local audits_key, copies_key, kinds_key, disputes_key = KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local token, worker, session = ARGV[1], ARGV[2], ARGV[3]
local and_news = ARGV[4] -- 1: the worker reads the news right after this script, so if the next version is current
-- and has news, the lease is on the next version; else 0

local devices = tonumber(ARGV[5]) -- units that the worker computes at once

local SHORTEST_MS = 2000 -- of a lease
local UNMEASURED_MS = 5000 -- assumed time of a micro-batch until any worker is measured
local TOGETHER_MS = 1000 -- these constants are those of `computeshare/protocol/lease_policy.py`
local SHORT_MS = 50
local TRIED_AGAIN_AFTER = 8
local BACKUP_FACTOR, BACKUP_MS = 1.5, 100
local EXPECTED_MS = 250 -- how much later than this worker the others may ask
local status, current, first, count, cursor, version, opened, total, closed, needed, base, backup,
  sharers, fewest, unmeasured, doubled, audit, secret, peers, singles = unpack(redis.call("HMGET", round_key,
  "status", "token", "first", "count", "cursor", "version", "opened", "total", "closed", "needed", "base", "backup",
  "sharers", "fewest", "unmeasured", "doubled", "audit", "secret", "peers", "singles"))
if not status then return {"gone", "", 0} end
if status ~= "running" then return {status, current, 0} end
if redis.call("HGET", sessions_key, worker) ~= session then
  return {redis.call("HEXISTS", banned_key, worker) == 1 and "banned" or "fenced", current, 0}
end
if current ~= token and (and_news == "0" or base ~= token or redis.call("EXISTS", news_key) == 0) then
  return {"stale", current, 0}
end
first, count, cursor, total = tonumber(first), tonumber(count), tonumber(cursor), tonumber(total)
needed, opened = tonumber(needed), tonumber(opened)
sharers, fewest, unmeasured = tonumber(sharers), tonumber(fewest), tonumber(unmeasured)
audit = tonumber(audit or "0")
if closed or redis.call("HLEN", received_key) >= needed then
  return {"wait", current, 1000} -- the round is complete: the reducer is making the next version
end

local now = now_ms()
local workers = redis.call("HKEYS", sessions_key)
if (sharers > 0 and machines_of(workers) or #workers) < fewest then return {"wait", current, 1000} end

local own, usual, known = {}, 0, 0 -- by worker: {ms for a unit, when its last one was done}
for i, told in ipairs(redis.call("HMGET", speeds_key, unpack(workers))) do
  local each, at = (told or ""):match("^(.-)|(.*)$")
  own[workers[i]] = each and {tonumber(each), tonumber(at)}
  if each then usual, known = usual + each, known + 1 end
end
usual = known > 0 and usual / known or UNMEASURED_MS
local measured = own[worker]
local speed, idle = (measured or {usual})[1], now - (measured or {0, 0})[2]

local leases, held = {redis.call("HGETALL", leases_key), redis.call("HGETALL", backups_key)}, {}
for _, all in ipairs(leases) do -- by worker: how many units, since when
  for i = 2, #all, 2 do
    local expires, since, holder = all[i]:match("^.-|(.-)|(.-)|(.*)$")
    if tonumber(expires) > now then
      local one = held[holder] or {0, math.huge}
      held[holder] = {one[1] + 1, math.min(one[2], tonumber(since))}
    end
  end
end

local function late(holder) -- ms since the holder should have finished its leases; negative: ms until then
  return now - held[holder][2] - held[holder][1] * (own[holder] or {usual})[1]
end
local function remaining(holder) -- expected ms until the holder finishes; a late holder needs its delay again
  return math.abs(late(holder))
end

local room = math.huge -- units that this machine may still make, if there is a limit
if sharers > 0 then
  room = math.ceil(needed / sharers)
  for holder, one in pairs(held) do
    if machine_of(holder) == machine_of(worker) then room = room - one[1] end
  end
  for _, entry in ipairs(redis.call("HVALS", received_key)) do
    if machine_of(cjson.decode(entry).worker) == machine_of(worker) then room = room - 1 end
  end
  if room < 1 then return {"wait", current, 1000} end
end

local again = 4000
local most = measured and math.max(devices, math.floor(TOGETHER_MS / speed)) or math.huge
if not measured and unmeasured > 0 then most = unmeasured * devices end
if peers == "1" or singles == "1" then most = 1 end
local fair = math.min(math.ceil(needed / #workers), most, room)
local share = fair
local left = redis.call("LLEN", free_key) + count - cursor

local function set_share_by_speed()
  local peers = {}
  for _, other in ipairs(workers) do
    local each, done = unpack(own[other] or {usual, 0})
    if other ~= worker and held[other] then
      peers[#peers + 1] = {remaining(other), each}
    elseif other ~= worker and now - math.max(opened, done) < math.max(EXPECTED_MS, each) then -- else idle for too long
      peers[#peers + 1] = {0, each}
    end
  end
  local function is_needed(nth) -- whether the others would leave an nth unit to this worker
    local ended = math.ceil(nth / devices) * devices * speed -- they end together, `devices` of them at a time
    for _, peer in ipairs(peers) do
      if ended > peer[1] then nth = nth + math.ceil((ended - peer[1]) / peer[2] - 1e-9) - 1 end
    end
    return nth <= left
  end
  most, share = math.min(most, left), 0
  while share < most and is_needed(share + 1) do share = share + 1 end
  if share > 0 or left == 0 then return end
  if idle > TRIED_AGAIN_AFTER * speed then share = 1 end
  again = math.max(20, speed / 8)
end

local by_speed = singles ~= "1" and speed >= SHORT_MS and needed == total
if by_speed and sharers == 0 and redis.call("EXISTS", suspects_key) == 0 then
  set_share_by_speed()
end

local granted, moved = {}, {}
local others, aside = machines_of(workers) > 1 and sharers == 0, {}
local function is_suspect(freed) -- whether only this machine has computed it, with values that were not finite
  local suspects = others and redis.call("HGET", suspects_key, freed)
  if not suspects then return false end
  for suspect in pairs(cjson.decode(suspects)) do
    if machine_of(suspect) ~= machine_of(worker) then return false end
  end
  return true
end
local function is_others(freed) -- whether a dispute is about it that another machine, a third of its kind, can decide
  local parties = audit > 0 and redis.call("HGET", disputes_key, freed)
  if not parties then return false end
  local known, kind = {}, nil
  for party in pairs(cjson.decode(parties)) do
    known[machine_of(party)] = true
    kind = redis.call("HGET", kinds_key, party)
  end
  local function decides(one) return not known[machine_of(one)] and redis.call("HGET", kinds_key, one) == kind end
  if decides(worker) then return false end
  for _, other in ipairs(workers) do
    if decides(other) then return true end
  end
  return false
end

while #granted < share do
  local freed = redis.call("LPOP", free_key)
  if freed then
    if is_suspect(freed) or is_others(freed) then
      aside[#aside + 1] = freed -- another machine must compute it
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
redis.call("HSET", round_key, "cursor", cursor)
for _, micro_batch in ipairs(aside) do redis.call("RPUSH", free_key, micro_batch) end
if #aside > 0 then again = 500 end

local LOOKED_AT = 256 -- units not leased yet that may become a copy

local function is_audited(unit)
  return tonumber(redis.sha1hex(secret .. current .. "." .. unit):sub(1, 8), 16) < audit * 2 ^ 32
end

local function find_copy() -- a unit that this worker computes beside its own, for the reducer to compare; or nil
  local kind, own = redis.call("HGET", kinds_key, worker), {}
  for _, unit in ipairs(granted) do own[unit] = true end
  local function suits(unit, holder)
    if own[unit] or redis.call("HEXISTS", copies_key, unit) == 1 then return false end
    if holder and machine_of(holder) == machine_of(worker) then return false end
    if holder and redis.call("HGET", kinds_key, holder) ~= kind then return false end
    return tonumber((redis.call("HGET", audits_key, unit) or "|0|"):match("^.-|(.-)|")) <= now
  end
  for i = 1, #leases[1], 2 do
    local holder = leases[1][i + 1]:match("^.-|.-|.-|(.*)$")
    if is_audited(leases[1][i]) and suits(leases[1][i], holder) then return leases[1][i] end
  end
  for _, unit in ipairs(redis.call("HKEYS", received_key)) do
    if is_audited(unit) and suits(unit, cjson.decode(redis.call("HGET", received_key, unit)).worker) then return unit end
  end
  for place = cursor, math.min(count, cursor + LOOKED_AT) - 1 do
    local unit = string.format("%d", first + place)
    if is_audited(unit) and suits(unit) then return unit end
  end
end

local copy = audit > 0 and #granted > 0 and find_copy() or nil

local target = leases_key

local function take_expired()
  for i = 1, #leases[1], 2 do
    local expires, since, holder = leases[1][i + 1]:match("^.-|(.-)|(.-)|(.*)$")
    if tonumber(expires) > now then
      again = math.min(again, expires - now)
    elseif #granted < fair then
      granted[#granted + 1] = leases[1][i]
      moved[#moved + 1] = {from = holder, after_ms = now - since, micro_batch = tonumber(leases[1][i])}
    end
  end
end

local function take_backup() -- all micro-batches of one slow holder
  local from
  for i = 1, #leases[1], 2 do
    local other, holder = leases[1][i + 1]:match("^(.-)|.-|.-|(.*)$")
    if other ~= session and redis.call("HEXISTS", backups_key, leases[1][i]) == 0 then
      local cost = BACKUP_FACTOR * held[holder][1] * speed + BACKUP_MS
      if cost < remaining(holder) and (from or holder) == holder and #granted < room then
        from, target = holder, backups_key
        granted[#granted + 1] = leases[1][i]
      else
        again = math.min(again, cost - late(holder))
      end
    end
  end
  if from then
    redis.call("HSET", round_key, "doubled", (doubled and doubled .. "," or "") .. table.concat(granted, ","))
  end
end

if #granted == 0 then take_expired() end
if #granted == 0 and backup == "1" then take_backup() end
if #granted == 0 then return {"wait", current, math.max(20, math.ceil(again))} end

local life = math.max(SHORTEST_MS, 4 * speed * math.max(devices, #granted + (copy and 1 or 0)))
local lease = string.format("%s|%.0f|%.0f|%s", session, now + life, now, worker)
for _, micro_batch in ipairs(granted) do redis.call("HSET", target, micro_batch, lease) end
for _, event in ipairs(moved) do
  event.to, event.version = worker, tonumber(version)
  append_event(events_key, "reassigned", cjson.encode(event))
end
local answer = {"leased", current, math.ceil(life)}
for _, micro_batch in ipairs(granted) do answer[#answer + 1] = micro_batch end
if copy then
  redis.call("HSET", audits_key, copy, lease)
  answer[#answer + 1] = copy
end
return answer
