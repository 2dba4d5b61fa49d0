-- submit.lua: accept a worker's updates, each micro-batch once. An update must be computed on the current version, or
-- on one that will still be recent enough for the version of which the update becomes a part.
-- The reducer wrote the terms into the round: `sharers` (machines that must share a version, none with more than an
-- equal share; 0: no limit), `limit` (bytes of an update; of a larger one only the size is kept, and the reducer
-- refuses it), `parts` (of an update; 0: no limit), `peers` (1: the update is also kept as the worker's newest, for
-- other workers to read), `delay` (1: an update must be computed on the version before its round's own: those for the
-- round after the current one, which begins with the unit `first` + `count`, on the current version; they wait apart).
-- Returns {outcome, current token, status, earlier outcome for this nonce (empty: none)}. The outcome is `accepted` (at
-- least one micro-batch), `duplicate`, `stale`, `lease_lost`, `fenced`, `refused` (staged messages expired or are
-- incomplete) or `gone`. Only `accepted` adds to the round's updates. Late and incomplete micro-batches are handed
-- back. The outcome is stored under the nonce, until about 2,048 later ones have been stored.
local round_key, sessions_key, leases_key, backups_key, received_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local speeds_key, answers_key, full_key, events_key, free_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local arrivals_key, recent_key, audits_key, copies_key = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local peers_key, peer_key = KEYS[15], KEYS[16] -- peer: the worker's newest published weights
local early_key = KEYS[17] -- what the next round has received
local offers_key = KEYS[18] -- what is staged of updates that are not submitted yet
local early_offers_key = KEYS[19] -- likewise for the next round
local disputes_key = KEYS[20]
local staged_keys, update_keys = slice(KEYS, 21, 2), slice(KEYS, 22, 2) -- for each micro-batch
local token, worker, session, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local event = ARGV[5] -- JSON object: the worker's description of the submission
local parts = tonumber(ARGV[6]) -- number of parts of each message
local micro_batches, losses = slice(ARGV, 7, 2), slice(ARGV, 8, 2)

local status, current, opened, total, needed, closed, recent, sharers, limit, most, peers, delay, base, first, count,
  ahead = unpack(redis.call("HMGET", round_key, "status", "token", "opened", "total", "needed", "closed", "recent",
    "sharers", "limit", "parts", "peers", "delay", "base", "first", "count", "ahead"))
delay = delay == "1"
total, needed, sharers, limit = tonumber(total), tonumber(needed), tonumber(sharers), tonumber(limit)
most = tonumber(most or "0")
parts = math.max(1, parts)
local clock = redis.call("TIME")
local now = now_ms()
local counted, late = {}, {}
local ANSWERS = 2048 -- stored outcomes: at least this many, at most twice as many
local nonce_sha1 = redis.sha1hex(nonce) -- a fixed length, whatever the sender chose
local said = fields_of(event)
if not said then return redis.error_reply("a submission's event is a JSON object of at most 64 KiB") end
if #nonce > LONGEST_NAME then return redis.error_reply("a submission's nonce has at most 100 characters") end
local seen = {}
for _, micro_batch in ipairs(micro_batches) do
  if seen[micro_batch] then return redis.error_reply("a submission names each micro-batch once") end
  seen[micro_batch] = true
end

local function weigh(message) -- bytes of all parts; nil if the parts are not 0 to `parts` - 1
  if most > 0 and parts > most or redis.call("HLEN", message) ~= parts then return nil end
  local bytes = 0
  for part = 0, parts - 1 do
    local length = redis.call("HSTRLEN", message, part)
    if length == 0 then return nil end
    bytes = bytes + length
  end
  return bytes
end

local sender = string.format('"worker":%s,"session":%s,"nonce":%s,"base":%s', cjson.encode(worker),
  cjson.encode(session), cjson.encode(nonce), cjson.encode(token))
local function entry(i, bytes, place) -- the record of a received micro-batch
  local loss = tonumber(losses[i]) or 0 / 0
  loss = loss ~= loss and "NaN" or math.abs(loss) == math.huge and "Infinity" or string.format("%.17g", loss)
  return string.format('{%s,"loss":%s,"size":%d,"at":%.3f}', sender, loss, bytes,
    clock[1] * 1000 + (clock[2] + place) / 1000) -- all times differ, so that the order is unambiguous
end

local function drop_staged() -- accepted messages have been renamed before
  for _, key in ipairs(staged_keys) do redis.call("UNLINK", key) end
end

if not status then
  drop_staged()
  return {"gone", "", "gone", ""}
end

local function remember(outcome) -- with a running number, so that the oldest can be deleted
  local place = redis.call("HINCRBY", answers_key, "places", 1)
  redis.call("HSET", answers_key, nonce_sha1, place .. "|" .. outcome)
  if redis.call("HLEN", answers_key) <= 2 * ANSWERS then return end
  local held = redis.call("HGETALL", answers_key)
  for i = 1, #held, 2 do
    local at = held[i + 1]:match("^(%d+)|")
    if at and tonumber(at) <= place - ANSWERS then redis.call("HDEL", answers_key, held[i]) end
  end
end

local known = redis.call("HGET", answers_key, nonce_sha1) -- what an earlier submission with this nonce was answered
local function answer(outcome)
  drop_staged()
  if not known then remember(outcome) end
  append_event(events_key, "submission", object_of(said, string.format(
    '"outcome":"%s","current":"%s","counted":[%s],"late":[%s],%s',
    outcome, current, table.concat(counted, ","), table.concat(late, ","), sender)))
  return {outcome, current, status, known and known:match("|(.*)$") or ""}
end

if known then return answer("duplicate") end
if redis.call("HGET", sessions_key, worker) ~= session then return answer("fenced") end

local function mine(i) -- the sender's lease on a micro-batch, and the key that holds the lease
  for _, key in ipairs({leases_key, backups_key}) do
    local lease = redis.call("HGET", key, micro_batches[i])
    if lease and lease:match("^[^|]*") == session then return lease, key end
  end
end

local function hand_back(i)
  local lease, key = mine(i)
  if lease then redis.call("HDEL", key, micro_batches[i]) end
  if lease and key == leases_key then redis.call("RPUSH", free_key, micro_batches[i]) end
end

local behind = redis.call("LPOS", recent_key, token)
if status ~= "running" or not behind then
  for i = 1, #micro_batches do hand_back(i) end
  return answer("stale")
end

local function measure(who, each, at_least) -- update a worker's time per unit; a single slow unit has little weight
  if each < 0 then return end -- the clock was set back
  local known = tonumber((redis.call("HGET", speeds_key, who) or ""):match("^[^|]+"))
  if known and at_least then each = math.max(each, known) end
  if known then each = known * (each / known) ^ (each > known and 0.2 or 0.5) end
  redis.call("HSET", speeds_key, who, string.format("%.1f|%.0f", math.max(1, each), now))
end

local function is_early(micro_batch) return delay and is_of_next_round(micro_batch, first, count) end
local function is_late(micro_batch, place) -- whether its update will not count any more; `place`: in this submission
  if not delay then return behind + math.floor(place / needed) >= tonumber(recent) end
  return token ~= delayed_base(is_early(micro_batch), current, base)
end

local disputed, disputes = {}, redis.call("HGETALL", disputes_key) -- units that are of no worker's share
for i = 1, #disputes, 2 do disputed[disputes[i]] = not cjson.decode(disputes[i + 1]).copied end
local function room_in(key, units, needs) -- how many of a round's updates may still be this worker's
  local room = closed and 0 or units -- a closed round accepts no more
  if sharers == 0 then return room end
  room = math.min(room, math.ceil(needs / sharers))
  local held = redis.call("HGETALL", key)
  for i = 1, #held, 2 do
    local is_own = machine_of(cjson.decode(held[i + 1]).worker) == machine_of(worker)
    if is_own and not disputed[held[i]] then room = room - 1 end
  end
  return room
end

local accepted, copies, already, expired, leased = {}, {}, 0, 0, math.huge
local waiting = redis.call("HLEN", received_key) -- earlier updates become part of earlier versions
local rooms = {[received_key] = room_in(received_key, total, needed)}
if delay then rooms[early_key] = room_in(early_key, tonumber(ahead), tonumber(ahead)) end
for i, micro_batch in ipairs(micro_batches) do
  local into = is_early(micro_batch) and early_key or received_key
  local lease = mine(i)
  local is_copy = not lease and (redis.call("HGET", audits_key, micro_batch) or ""):match("^[^|]*") == session
  local bytes = (lease or is_copy) and weigh(staged_keys[i])
  if is_copy and bytes and not is_late(micro_batch, 0) then -- else nobody would ever look for it
    copies[#copies + 1] = {i, bytes}
  elseif redis.call("HEXISTS", into, micro_batch) == 1 then
    already = already + 1
  elseif lease and not bytes then
    expired = expired + 1
    hand_back(i)
  elseif lease and is_late(micro_batch, waiting + #accepted) then
    late[#late + 1] = micro_batch
    hand_back(i)
  elseif lease and (rooms[into] > 0 or disputed[micro_batch] and not closed) then
    if not disputed[micro_batch] then rooms[into] = rooms[into] - 1 end
    accepted[#accepted + 1] = {i, bytes, into}
    leased = math.min(leased, tonumber(lease:match("^.-|.-|(.-)|")))
  end
end
for place, one in ipairs(copies) do -- for the reducer to compare with the update that counts
  local i, bytes = one[1], one[2]
  if limit == 0 or bytes <= limit then keep_staged(staged_keys[i], update_keys[i] .. ":copy") end -- JobKeys.copy
  redis.call("HSET", copies_key, micro_batches[i], entry(i, bytes, #accepted + place))
  redis.call("HDEL", audits_key, micro_batches[i])
end
if #accepted == 0 then
  if #copies > 0 then return answer("accepted") end
  if #late > 0 then return answer("stale") end
  return answer(expired > 0 and "refused" or already > 0 and "duplicate" or "lease_lost")
end

local overtaken = {} -- other workers' lease to the number of accepted micro-batches that it holds
for place, one in ipairs(accepted) do
  local i, bytes = one[1], one[2]
  local micro_batch = micro_batches[i]
  if limit == 0 or bytes <= limit then keep_staged(staged_keys[i], update_keys[i]) end
  redis.call("HSET", one[3], micro_batch, entry(i, bytes, place))
  for _, key in ipairs({leases_key, backups_key}) do
    local found = redis.call("HGET", key, micro_batch)
    if found then
      local holder, lease = found:match("^(.-)|.-|(.*)$")
      if holder ~= session then overtaken[lease] = (overtaken[lease] or 0) + 1 end
      redis.call("HDEL", key, micro_batch)
    end
  end
  redis.call("HDEL", one[3] == early_key and early_offers_key or offers_key, micro_batch)
  redis.call("LREM", free_key, 0, micro_batch) -- it is there if the first lease was handed back before a backup arrived
  counted[#counted + 1] = micro_batch
  if now >= tonumber(opened) then redis.call("LPUSH", arrivals_key, now - opened) end -- else the clock was set back
end
redis.call("LTRIM", arrivals_key, 0, 63)
local PEER_S = 600 -- life of published weights
if peers == "1" and redis.call("COPY", update_keys[accepted[#accepted][1]], peer_key, "REPLACE") == 1 then
  redis.call("EXPIRE", peer_key, PEER_S)
  local units = tonumber((redis.call("HGET", peers_key, worker) or ""):match("^.-|(%d+)|")) or 0
  local loss = tonumber(losses[accepted[#accepted][1]]) or 0 / 0
  redis.call("HSET", peers_key, worker, string.format("%s|%d|%.9g|%.0f", token, units + #accepted, loss, now))
end
measure(worker, (now - leased) / (#accepted + #copies))
for lease, units in pairs(overtaken) do -- the other worker takes at least this long
  local since, holder = lease:match("^(.-)|(.*)$")
  measure(holder, (now - since) / units, true)
end
wake_reducer_if_due(full_key, current, received_key, offers_key, needed, total)
return answer("accepted")
