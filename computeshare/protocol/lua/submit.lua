-- submit.lua: accept a worker's updates, each micro-batch once, that were computed on the current version or on one
-- that will still be recent enough when the version is made that they become part of.
-- KEYS  1 round   2 sessions   3 leases   4 backups   5 received   6 speeds   7 answers   8 full   9 events   10 free
--       11 arrivals   12 recent   then for each micro-batch: its staged message, its update
-- ARGV  1 token   2 worker   3 session   4 nonce   5 event (JSON object: what the worker says of the submission)
--       6 parts of a message   then for each micro-batch: its number, its loss
-- The terms stand in the round, where its reducer wrote them: `sharers` (fewest workers that may make a round, each of
-- them its share at most; 0: any), `limit` (bytes of an update; one that is larger is not kept, so that nobody reads it,
-- but its size is: the reducer refuses it).
-- Returns {outcome, current token, status, answer to the nonce before (empty: none)}; the outcome is `accepted` (with at least one micro-batch), `duplicate`,
-- `stale`, `lease_lost`, `fenced`, `refused` (a staged message is not whole, or expired) or `gone`. Only `accepted` changes
-- what the round has received; what comes too late, or is not whole, is handed back; the answer is remembered under the
-- nonce, as long as not very many others came after it.
local round = redis.call("HMGET", KEYS[1], "status", "token", "opened", "total", "needed", "closed", "recent", "sizes",
  "sharers", "limit")
local status, token, total, needed, closed = round[1], round[2], tonumber(round[4]), tonumber(round[5]), round[6]
local sharers, limit = tonumber(round[9]), tonumber(round[10])
local parts = math.max(1, tonumber(ARGV[6]))
local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local counted, late = {}, {}
local ANSWERS = 2048 -- that are remembered at least; twice as many at most
local nonce = redis.sha1hex(ARGV[4]) -- of a length that the sender does not choose
cjson.decode(ARGV[5]) -- raises, with no effect, on anything but JSON
local said = ARGV[5]:match("^%s*{(.*)}%s*$")
if not said then return redis.error_reply("a submission's event is a JSON object") end

local function weigh(message) -- bytes of all its parts; nothing if it has others than these
  local bytes = 0
  for part = 0, parts - 1 do
    local length = redis.call("HSTRLEN", message, part)
    if length == 0 then return nil end
    bytes = bytes + length
  end
  return redis.call("HLEN", message) == parts and bytes or nil
end

local function entry(i, bytes, place, leased) -- what is kept of a micro-batch; who sent it is not the sender's to say
  local loss = tonumber(ARGV[8 + 2 * i]) or 0 / 0
  loss = loss ~= loss and "NaN" or math.abs(loss) == math.huge and "Infinity" or string.format("%.17g", loss)
  return string.format('{"worker":%s,"session":%s,"nonce":%s,"base":%s,"loss":%s,"size":%d,"leased":%s,"at":%.3f}',
    cjson.encode(ARGV[2]), cjson.encode(ARGV[3]), cjson.encode(ARGV[4]), cjson.encode(ARGV[1]), loss, bytes, leased,
    clock[1] * 1000 + (clock[2] + place) / 1000) -- no two are alike, so that all agree on their order
end

local function drop_staged() -- what was accepted has another name by now
  for i = 13, #KEYS, 2 do redis.call("UNLINK", KEYS[i]) end
end

if not status then
  drop_staged()
  return {"gone", "", "gone", ""}
end

local function remember(outcome) -- with its place among all answers, so that the oldest can give way
  local place = redis.call("HINCRBY", KEYS[7], "places", 1)
  redis.call("HSET", KEYS[7], nonce, place .. "|" .. outcome)
  if redis.call("HLEN", KEYS[7]) <= 2 * ANSWERS then return end
  local held = redis.call("HGETALL", KEYS[7])
  for i = 1, #held, 2 do
    local at = held[i + 1]:match("^(%d+)|")
    if at and tonumber(at) <= place - ANSWERS then redis.call("HDEL", KEYS[7], held[i]) end
  end
end

local function answer(outcome)
  local known = redis.call("HGET", KEYS[7], nonce)
  drop_staged()
  if not known then remember(outcome) end
  local script_says = string.format( -- comes last, so that it holds whatever the worker says
    '"outcome":"%s","current":"%s","counted":[%s],"late":[%s],"sizes":[%s],"worker":%s,"session":%s,"nonce":%s,"base":%s',
    outcome, token, table.concat(counted, ","), table.concat(late, ","), round[8] or "", cjson.encode(ARGV[2]),
    cjson.encode(ARGV[3]), cjson.encode(ARGV[4]), cjson.encode(ARGV[1]))
  redis.call("XADD", KEYS[9], "*", "type", "submission", "at", now, "data",
    "{" .. said .. (said:match("%S") and "," or "") .. script_says .. "}")
  return {outcome, token, status, known and known:match("|(.*)$") or ""}
end

if redis.call("HEXISTS", KEYS[7], nonce) == 1 then return answer("duplicate") end
if redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3] then return answer("fenced") end

local function mine(i) -- the lease on a micro-batch, if the sender holds it; and the hash it stands in
  for _, key in ipairs({KEYS[3], KEYS[4]}) do
    local lease = redis.call("HGET", key, ARGV[7 + 2 * i])
    if lease and lease:match("^[^|]*") == ARGV[3] then return lease, key end
  end
end

local function hand_back(i)
  local lease, key = mine(i)
  if lease then redis.call("HDEL", key, ARGV[7 + 2 * i]) end
  if lease and key == KEYS[3] then redis.call("RPUSH", KEYS[10], ARGV[7 + 2 * i]) end
end

local count = (#ARGV - 6) / 2
local behind = redis.call("LPOS", KEYS[12], ARGV[1])
if status ~= "running" or not behind then
  for i = 0, count - 1 do hand_back(i) end
  return answer("stale")
end

local function measure(worker, each, at_least) -- what a unit takes it; one slow unit is no slow machine
  local known = tonumber((redis.call("HGET", KEYS[6], worker) or ""):match("^[^|]+"))
  if known and at_least then each = math.max(each, known) end
  if known then each = known * (each / known) ^ (each > known and 0.2 or 0.5) end
  redis.call("HSET", KEYS[6], worker, string.format("%.1f|%.0f", math.max(1, each), now))
end

local accepted, named, already, expired, leased = {}, {}, 0, 0, now
local waiting = redis.call("HLEN", KEYS[5]) -- what has come before makes versions before
local room = closed and 0 or total -- a closed round takes no more
if sharers > 0 then
  room = math.min(room, math.ceil(total / sharers))
  for _, entry in ipairs(redis.call("HVALS", KEYS[5])) do
    if cjson.decode(entry).worker == ARGV[2] then room = room - 1 end
  end
end
for i = 0, count - 1 do
  local micro_batch = ARGV[7 + 2 * i]
  local lease = mine(i)
  local bytes = lease and weigh(KEYS[13 + 2 * i])
  if named[micro_batch] or redis.call("HEXISTS", KEYS[5], micro_batch) == 1 then
    already = already + 1
  elseif lease and not bytes then
    expired = expired + 1
    hand_back(i)
  elseif lease and behind + math.floor((waiting + #accepted) / needed) >= tonumber(round[7]) then
    late[#late + 1] = micro_batch
    hand_back(i)
  elseif lease and #accepted < room then
    local at = lease:match("^.-|.-|(.-)|")
    accepted[#accepted + 1] = {i, bytes, at}
    named[micro_batch] = true
    leased = math.min(leased, tonumber(at))
  end
end
if #accepted == 0 then
  if #late > 0 then return answer("stale") end
  return answer(expired > 0 and "refused" or already > 0 and "duplicate" or "lease_lost")
end

local overtaken = {} -- how many of them others hold, by their lease
for place, one in ipairs(accepted) do
  local i, bytes, at = one[1], one[2], one[3]
  local micro_batch = ARGV[7 + 2 * i]
  if limit == 0 or bytes <= limit then
    redis.call("RENAME", KEYS[13 + 2 * i], KEYS[14 + 2 * i])
    redis.call("PERSIST", KEYS[14 + 2 * i])
  end
  redis.call("HSET", KEYS[5], micro_batch, entry(i, bytes, place, at))
  for _, key in ipairs({KEYS[3], KEYS[4]}) do
    local session, rest = (redis.call("HGET", key, micro_batch) or ""):match("^(.-)|.-|(.*)$")
    if session and session ~= ARGV[3] then overtaken[rest] = (overtaken[rest] or 0) + 1 end
    redis.call("HDEL", key, micro_batch)
  end
  redis.call("LREM", KEYS[10], 0, micro_batch) -- where a backup came after the first lease was handed back
  counted[#counted + 1] = micro_batch
  redis.call("LPUSH", KEYS[11], now - tonumber(round[3]))
end
redis.call("LTRIM", KEYS[11], 0, 63)
measure(ARGV[2], (now - leased) / #accepted)
for lease, units in pairs(overtaken) do -- whoever has not done them by now is at least so slow
  local since, worker = lease:match("^(.-)|(.*)$")
  measure(worker, (now - since) / units, true)
end
if redis.call("HLEN", KEYS[5]) >= needed then
  redis.call("DEL", KEYS[8])
  redis.call("RPUSH", KEYS[8], token)
end
return answer("accepted")
