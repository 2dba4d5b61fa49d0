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
-- which no worker knows, decides which units these are; copies of suspected units come before all other units, and
-- disputed units go to a third machine of the kind, whatever its share), `peers` (1: a worker publishes its weights after
-- each unit, so it gets one at a time, on any of the `recent` versions but the last, which the next version makes too
-- old), `singles` (1: leases are single units whatever a worker's speed, which is that of a chain),
-- `delay` (1: a round's units are computed on the version before the round's own; when it has none left, units of the
-- next round are leased, of which there are `ahead`, to be computed on the current version. The answer names the version
-- to compute on, which may be another than the worker's).
-- Returns {answer, current token, ms until the next request makes sense, micro-batch, ...}. The answer is `leased`,
-- `wait`, `stale` (another version is current), `fenced`, `banned`, `gone` (the job is not open), or the job's status
-- if it is not running. Only `leased` changes anything and returns micro-batches.
local round_key, sessions_key, leases_key, backups_key, received_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local free_key, speeds_key, events_key, suspects_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local audits_key, copies_key, kinds_key, disputes_key = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local early_key = KEYS[14] -- what the next round has received
local recent_key = KEYS[15] -- tokens of the versions that an update may be computed on, the newest first
local token, worker, session = ARGV[1], ARGV[2], ARGV[3]
local and_news = ARGV[4] -- 1: the worker reads the news right after this script, so if the next version is current
-- and has news, the lease is on the next version; else 0

local devices = tonumber(ARGV[5]) -- units that the worker computes at once
local banned_key = job_of(round_key) .. ":banned"
local news_key = job_of(round_key) .. ":news:" .. token -- of the version after the token's

local SHORTEST_MS = 2000 -- of a lease
local UNMEASURED_MS = 5000 -- assumed time of a micro-batch until any worker is measured
local TOGETHER_MS = 1000 -- these constants are those of `computeshare/protocol/lease_policy.py`
local SHORT_MS = 50
local TRIED_AGAIN_AFTER = 8
local BACKUP_MARGIN, BACKUP_MS = 0.5, 100
local FETCHED_FACTOR = 4 -- times the cost of a backup on a version that the worker would have to fetch
local EXPECTED_MS = 250 -- how much later than this worker the others may ask
local status, current, first, count, cursor, version, opened, total, closed, needed, base, backup,
  sharers, fewest, unmeasured, doubled, audit, secret, peers, singles, delay, ahead,
  ahead_cursor, recent = unpack(redis.call("HMGET", round_key, "status", "token", "first", "count", "cursor", "version",
  "opened", "total", "closed", "needed", "base", "backup", "sharers", "fewest", "unmeasured", "doubled", "audit",
  "secret", "peers", "singles", "delay", "ahead", "ahead_cursor", "recent"))
if not status then return {"gone", "", 0} end
if status ~= "running" then return {status, current, 0} end
if redis.call("HGET", sessions_key, worker) ~= session then
  return {redis.call("HEXISTS", banned_key, worker) == 1 and "banned" or "fenced", current, 0}
end
delay = delay == "1"
local function suffices() -- whether the worker may compute without another version
  if current == token or delay then return true end
  if peers == "1" then return (redis.call("LPOS", recent_key, token) or tonumber(recent)) < tonumber(recent) - 1 end
  return and_news == "1" and base == token and redis.call("EXISTS", news_key) == 1
end
if not suffices() then return {"stale", current, 0} end
first, count, cursor, total = tonumber(first), tonumber(count), tonumber(cursor), tonumber(total)
needed, opened = tonumber(needed), tonumber(opened)
sharers, fewest, unmeasured = tonumber(sharers), tonumber(fewest), tonumber(unmeasured)
audit, version = tonumber(audit or "0"), tonumber(version)

local on, cursor_name = delay and base ~= "" and base or peers == "1" and token or current, "cursor" -- on: the version to compute on
local rounds = {{first, count, tonumber(cursor), needed, total, received_key, on, version, cursor_name}}
if delay and tonumber(ahead) > 0 then
  ahead = tonumber(ahead)
  rounds[2] = {first + count, ahead, tonumber(ahead_cursor), ahead, ahead, early_key, current, version + 1,
    "ahead_cursor"}
end
local function look_at(round)
  first, count, cursor, needed, total, received_key, on, version, cursor_name = unpack(round)
end
local incomplete = {}
for _, round in ipairs(rounds) do
  look_at(round)
  local is_complete = closed or redis.call("HLEN", received_key) >= needed
  if not is_complete then incomplete[#incomplete + 1] = round end
end
local now = now_ms()
local disputes, disputed = audit > 0 and redis.call("HGETALL", disputes_key) or {}, {}
for i = 1, #disputes, 2 do disputed[disputes[i]] = cjson.decode(disputes[i + 1]) end
local function decides(one, parties) -- whether a worker's machine is of the parties' kind and none of theirs
  local kind
  for party in pairs(parties) do
    if machine_of(party) == machine_of(one) then return false end
    kind = redis.call("HGET", kinds_key, party)
  end
  return kind and redis.call("HGET", kinds_key, one) == kind
end

local function is_copied(unit) -- or being copied
  if redis.call("HEXISTS", copies_key, unit) == 1 then return true end
  return tonumber((redis.call("HGET", audits_key, unit) or "|0|"):match("^.-|(.-)|")) > now
end
local function find_suspected() -- a unit of which the reducer wants a copy that this worker can make; or nil
  look_at(rounds[1])
  for i = 1, #disputes, 2 do
    local unit = disputes[i]
    local is_open = disputed[unit].copied and redis.call("HEXISTS", received_key, unit) == 1 and not is_copied(unit)
    if is_open and decides(worker, disputed[unit].parties) then return unit end
  end
end
local suspected = find_suspected()
if #incomplete == 0 and not suspected then
  return {"wait", current, 1000} -- the reducer is making the next version
end
local function is_of_round(unit) -- whether a unit is one of the round that is looked at
  unit = tonumber(unit)
  return not delay or unit >= first and unit < first + count
end

local workers = redis.call("HKEYS", sessions_key)
if not suspected and (sharers > 0 and machines_of(workers) or #workers) < fewest then return {"wait", current, 1000} end

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

local again, room, fair = 4000, 0, 0 -- room: units that this machine may still make, if there is a limit
local granted, moved, copy = {}, {}, nil

local function is_of_no_share(unit) -- taken back, or sent by two machines alike; not one that is merely suspected
  return disputed[unit] and not disputed[unit].copied
end
local function count_room()
  room = math.huge
  if sharers == 0 then return end
  room = math.ceil(needed / sharers)
  for _, all in ipairs(leases) do
    for i = 1, #all, 2 do
      local expires, holder = all[i + 1]:match("^.-|(.-)|.-|(.*)$")
      local counts = tonumber(expires) > now and is_of_round(all[i]) and not is_of_no_share(all[i])
      if counts and machine_of(holder) == machine_of(worker) then room = room - 1 end
    end
  end
  local received = redis.call("HGETALL", received_key)
  for i = 1, #received, 2 do
    local is_own = machine_of(cjson.decode(received[i + 1]).worker) == machine_of(worker)
    if is_own and not is_of_no_share(received[i]) then room = room - 1 end
  end
  if room < 1 then again = math.min(again, 1000) end
end

local function share_by_speed(most, left)
  local peers, share = {}, 0
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
  most = math.min(most, left)
  while share < most and is_needed(share + 1) do share = share + 1 end
  if share > 0 or left == 0 then return share end
  if idle > TRIED_AGAIN_AFTER * speed then share = 1 end
  again = math.max(20, speed / 8)
  return share
end

local function share_of_round() -- the number of units to lease
  local most = measured and math.max(devices, math.floor(TOGETHER_MS / speed)) or math.huge
  if not measured and unmeasured > 0 then most = unmeasured * devices end
  if peers == "1" or singles == "1" then most = 1 end
  count_room()
  fair = math.max(0, math.min(math.ceil(needed / #workers), most, room))
  local by_speed = singles ~= "1" and speed >= SHORT_MS and needed == total
  if by_speed and sharers == 0 and redis.call("EXISTS", suspects_key) == 0 then
    local freed = 0
    for _, unit in ipairs(redis.call("LRANGE", free_key, 0, -1)) do
      if is_of_round(unit) then freed = freed + 1 end
    end
    return share_by_speed(most, freed + count - cursor)
  end
  return fair
end

local others = machines_of(workers) > 1 and sharers == 0
local function is_suspect(freed) -- whether only this machine has computed it, with values that were not finite
  local suspects = others and redis.call("HGET", suspects_key, freed)
  if not suspects then return false end
  for suspect in pairs(cjson.decode(suspects)) do
    if machine_of(suspect) ~= machine_of(worker) then return false end
  end
  return true
end
local function is_others(unit) -- whether a dispute is about it that another machine is to decide, and still has time for
  local dispute = disputed[unit]
  if not dispute or now > dispute.ends or decides(worker, dispute.parties) then return false end
  for _, other in ipairs(workers) do
    if decides(other, dispute.parties) then return true end
  end
  return false
end

local LOOKED_AT = 256 -- units not leased yet that may become a copy

local function is_audited(unit)
  return tonumber(redis.sha1hex(secret .. on .. "." .. unit):sub(1, 8), 16) < audit * 2 ^ 32
end

local function find_copy() -- a unit that this worker computes beside its own, for the reducer to compare; or nil
  local kind = redis.call("HGET", kinds_key, worker)
  local function suits(unit, holder)
    if is_copied(unit) or not is_of_round(unit) then return false end
    if holder and machine_of(holder) == machine_of(worker) then return false end
    return not holder or redis.call("HGET", kinds_key, holder) == kind
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

local function offer() -- free units, then new ones
  local share, aside = share_of_round(), {}
  while #granted < share do
    local freed = redis.call("LPOP", free_key)
    if freed then
      if not is_of_round(freed) then
        aside[#aside + 1] = freed
      elseif is_suspect(freed) or is_others(freed) then
        aside[#aside + 1], again = freed, 500 -- another machine must compute it
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
  redis.call("HSET", round_key, cursor_name, cursor)
  for _, micro_batch in ipairs(aside) do redis.call("RPUSH", free_key, micro_batch) end
  copy = audit > 0 and #granted > 0 and find_copy() or nil
end

local target = leases_key

local function reassign(unit, since, holder) -- whose lease has run out
  granted[#granted + 1] = unit
  moved[#moved + 1] = {from = holder, after_ms = now - since, micro_batch = tonumber(unit)}
end

local function take_disputed() -- free or expired units about which this worker decides, whatever its share
  for i = 1, #disputes, 2 do
    local unit = disputes[i]
    if is_of_round(unit) and not disputed[unit].copied and decides(worker, disputed[unit].parties) then
      local expires, since, holder = (redis.call("HGET", leases_key, unit) or ""):match("^.-|(.-)|(.-)|(.*)$")
      if redis.call("LREM", free_key, 1, unit) == 1 then
        granted[#granted + 1] = unit
      elseif expires and tonumber(expires) <= now then
        reassign(unit, since, holder)
      end
    end
  end
end

local function take_expired()
  for i = 1, #leases[1], 2 do
    local expires, since, holder = leases[1][i + 1]:match("^.-|(.-)|(.-)|(.*)$")
    if tonumber(expires) > now then
      again = math.min(again, expires - now)
    elseif #granted < fair and is_of_round(leases[1][i]) and not is_others(leases[1][i]) then
      reassign(leases[1][i], since, holder)
    end
  end
end

local function take_backup() -- all micro-batches of one slow holder
  if room < 1 then return end
  local from
  for i = 1, #leases[1], 2 do
    local other, holder = leases[1][i + 1]:match("^(.-)|.-|.-|(.*)$")
    local is_open = is_of_round(leases[1][i]) and redis.call("HEXISTS", backups_key, leases[1][i]) == 0
    is_open = is_open and not is_others(leases[1][i])
    if other ~= session and is_open then
      local cost = held[holder][1] * speed
      cost = cost + (BACKUP_MARGIN * cost + BACKUP_MS) / math.sqrt(math.max(1, #workers - 1))
      if delay and on ~= token then cost = FETCHED_FACTOR * cost end
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

for _, round in ipairs(suspected and {} or incomplete) do
  if #granted == 0 then
    look_at(round)
    take_disputed()
    if #granted == 0 then offer() end
    if #granted == 0 then take_expired() end
  end
end
for _, round in ipairs(suspected and {} or incomplete) do
  if #granted == 0 and backup == "1" then
    look_at(round)
    count_room()
    take_backup()
  end
end
copy = copy or suspected
if #granted == 0 and not copy then return {"wait", current, math.max(20, math.ceil(again))} end

local life = math.max(SHORTEST_MS, 4 * speed * math.max(devices, #granted + (copy and 1 or 0)))
local lease = string.format("%s|%.0f|%.0f|%s", session, now + life, now, worker)
for _, micro_batch in ipairs(granted) do redis.call("HSET", target, micro_batch, lease) end
for _, event in ipairs(moved) do
  event.to, event.version = worker, version
  append_event(events_key, "reassigned", cjson.encode(event))
end
local answer = {"leased", on, math.ceil(life)}
for _, micro_batch in ipairs(granted) do answer[#answer + 1] = micro_batch end
if copy then
  redis.call("HSET", audits_key, copy, lease)
  answer[#answer + 1] = copy
end
return answer
