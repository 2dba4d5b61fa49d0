-- submit.lua: accept a worker's updates for the round they were computed on, each micro-batch once.
-- KEYS  1 round   2 sessions   3 leases   4 backups   5 received   6 speeds   7 nonce   8 full   9 events   10 free
--       11 arrivals   then for each micro-batch: its staged blob, its update
-- ARGV  1 token   2 worker   3 session   4 nonce   5 event (JSON object: what the worker says of the submission)
--       6 life of the answer, seconds   7 fewest workers that may make a round (0: any), each of them its share at most
--       then for each micro-batch: its number, its loss
-- Returns {outcome, current token, status, micro-batches of the round nobody has leased}; the outcome is `accepted`
-- (with at least one micro-batch), `duplicate`, `stale`, `lease_lost`, `fenced`, `refused` (a staged blob expired)
-- or `gone`. Only `accepted` changes the round; the answer is remembered under the nonce.
local round = redis.call("HMGET", KEYS[1], "status", "token", "count", "cursor", "opened", "total", "closed")
local status, token, total = round[1], round[2], tonumber(round[6])
local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local counted = {}
cjson.decode(ARGV[5]) -- raises, with no effect, on anything but JSON

local function entry(i) -- what is kept of a micro-batch; who sent it is not the sender's to say
  local loss = tonumber(ARGV[9 + 2 * i]) or 0 / 0
  loss = loss ~= loss and "NaN" or math.abs(loss) == math.huge and "Infinity" or string.format("%.17g", loss)
  return string.format('{"worker":%s,"session":%s,"nonce":%s,"loss":%s,"size":%d}', cjson.encode(ARGV[2]),
    cjson.encode(ARGV[3]), cjson.encode(ARGV[4]), loss, redis.call("STRLEN", KEYS[13 + 2 * i]))
end

local function drop_staged() -- what was accepted has another name by now
  for i = 12, #KEYS, 2 do redis.call("UNLINK", KEYS[i]) end
end

if not status then
  drop_staged()
  return {"gone", "", "gone", 0}
end

local function answer(outcome)
  drop_staged()
  redis.call("SET", KEYS[7], outcome, "EX", ARGV[6], "NX")
  redis.call("XADD", KEYS[9], "*", "type", "submission", "at", now, "data", string.format(
    '{"outcome":"%s","current":"%s","counted":[%s],%s', outcome, token, table.concat(counted, ","), ARGV[5]:sub(2)))
  local unleased = round[7] and 0 or tonumber(round[3]) - tonumber(round[4]) + redis.call("LLEN", KEYS[10])
  return {outcome, token, status, unleased}
end

if redis.call("EXISTS", KEYS[7]) == 1 then return answer("duplicate") end
if redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3] then return answer("fenced") end
if token ~= ARGV[1] or status ~= "running" then return answer("stale") end

local accepted, named, already, expired, leased = {}, {}, 0, 0, now
local room = round[7] and 0 or total -- a closed round takes no more
if ARGV[7] ~= "0" then
  room = math.min(room, math.ceil(total / tonumber(ARGV[7])))
  for _, entry in ipairs(redis.call("HVALS", KEYS[5])) do
    if cjson.decode(entry).worker == ARGV[2] then room = room - 1 end
  end
end
for i = 0, (#ARGV - 7) / 2 - 1 do
  local micro_batch = ARGV[8 + 2 * i]
  local lease = redis.call("HGET", KEYS[3], micro_batch)
  local backup = redis.call("HGET", KEYS[4], micro_batch)
  local mine = (lease and lease:match("^[^|]*") == ARGV[3] and lease) or (backup and backup:match("^[^|]*") == ARGV[3] and backup)
  if named[micro_batch] or redis.call("HEXISTS", KEYS[5], micro_batch) == 1 then
    already = already + 1
  elseif mine and redis.call("EXISTS", KEYS[12 + 2 * i]) == 0 then
    expired = expired + 1
  elseif mine and #accepted < room then
    accepted[#accepted + 1] = i
    named[micro_batch] = true
    leased = math.min(leased, tonumber(mine:match("^.-|.-|(.-)|")))
  end
end
if #accepted == 0 then
  return answer(expired > 0 and "refused" or already > 0 and "duplicate" or "lease_lost")
end

for _, i in ipairs(accepted) do
  local micro_batch = ARGV[8 + 2 * i]
  redis.call("RENAME", KEYS[12 + 2 * i], KEYS[13 + 2 * i]) -- first write: raises, with no effect, if the blob is gone
  redis.call("PERSIST", KEYS[13 + 2 * i])
  redis.call("HSET", KEYS[5], micro_batch, entry(i))
  redis.call("HDEL", KEYS[3], micro_batch)
  redis.call("HDEL", KEYS[4], micro_batch)
  counted[#counted + 1] = micro_batch
  redis.call("LPUSH", KEYS[11], now - tonumber(round[5]))
end
redis.call("LTRIM", KEYS[11], 0, 63)
local each = (now - leased) / #accepted
local known = tonumber(redis.call("HGET", KEYS[6], ARGV[2]))
redis.call("HSET", KEYS[6], ARGV[2], string.format("%.1f", math.max(1, known and 0.7 * known + 0.3 * each or each)))
if redis.call("HLEN", KEYS[5]) == total then
  redis.call("DEL", KEYS[8])
  redis.call("RPUSH", KEYS[8], token)
end
return answer("accepted")
