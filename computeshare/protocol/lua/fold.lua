-- fold.lua: while no control plane reads a job's events, move the oldest to the backlog, with submissions folded into
-- counts. All other events are moved unchanged.
-- A submission is moved unchanged if a control plane may have read it (and stored it, and died before it trimmed), if
-- it was there when the broker started (the broker may have forgotten how far was read), if a part of it may still be
-- refused, or if it is malformed.
-- Returns the number of events moved; 0 if there are too few, or the fence is outdated.
local fence_key, events_key, backlog_key, taken_key, received_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local early_key = KEYS[6] -- what the next round has received
local fence = ARGV[1]
local kept, moved = tonumber(ARGV[2]), tonumber(ARGV[3]) -- events to leave in the stream, and to move at a time

if redis.call("GET", fence_key) ~= fence then return 0 end
local run = redis.call("INFO", "server"):match("run_id:(%w+)")
local taken = redis.call("HMGET", taken_key, "run", "upto")
local upto = taken[2] or "0-0"
if taken[1] ~= run then
  local newest = redis.call("XREVRANGE", events_key, "+", "-", "COUNT", 1)
  upto = newest[1] and newest[1][1] or upto
  redis.call("HDEL", taken_key, "run") -- frees memory, so that the next command works in a full broker
  redis.call("HSET", taken_key, "run", run, "upto", upto)
end
if redis.call("XLEN", events_key) < kept + moved then return 0 end

local entries = redis.call("XRANGE", events_key, "-", "+", "COUNT", 4 * (kept + moved))
local before = redis.pcall("XINFO", "STREAM", backlog_key) -- an error if the stream does not exist yet
for i = 1, #before, 2 do
  if before[i] == "last-generated-id" and not is_after(entries[1][1], before[i + 1]) then return 0 end
end

local function read(entry) -- an event's type, its data if it is JSON, and its fields
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local kind = fields.type
  if kind ~= "submission" and kind ~= "refused" then return kind, nil, fields end
  local right, data = pcall(cjson.decode, fields.data)
  return kind, right and type(data) == "table" and data or nil, fields
end

local unsettled, refused = {}, {} -- nonces
for _, key in ipairs({received_key, early_key}) do
  for _, entry in ipairs(redis.call("HVALS", key)) do unsettled[cjson.decode(entry).nonce] = true end
end
for _, entry in ipairs(entries) do
  local kind, data = read(entry)
  if kind == "refused" and data and type(data.nonce) == "string" then refused[data.nonce] = true end
end

local OUTCOMES = {"accepted", "stale", "duplicate", "lease_lost", "fenced", "refused"}
local SECONDS = {"waiting", "computing", "encoding", "uploading"}

local function is_count(value) return type(value) == "number" and value >= 0 and value < 2 ^ 40 and value % 1 == 0 end

local function are_counts(values, may_lack)
  if type(values) ~= "table" then return may_lack and values == nil end
  for _, value in pairs(values) do
    if not is_count(value) then return false end
  end
  return #values <= 4096
end

local function is_token(value)
  return value == "" or type(value) == "string" and #(value:match("^%d+%.%d+%.([0-9a-f]+)$") or "") == 16
end

local function is_whole(data, fields) -- whether the control plane would store a row, and the sizes can be added
  for _, bytes in ipairs({data.bytes_up or -1, data.bytes_down or -1}) do
    if not is_count(bytes) or bytes >= 2 ^ 30 then return false end
  end
  for _, name in ipairs({data.worker or 0, data.nonce or 0}) do
    if type(name) ~= "string" or #name > 100 or name:find("[^\32-\126]") then return false end
  end
  if not (tonumber(fields.at) and is_token(data.base) and is_token(data.current)) then return false end
  if type(data.seconds) ~= "table" then return false end
  if not (are_counts(data.micro_batches) and are_counts(data.counted)) then return false end
  if not are_counts(data.late, true) then return false end
  for _, name in ipairs(SECONDS) do
    local value = data.seconds[name]
    if type(value) ~= "number" or value ~= value or math.abs(value) == math.huge then return false end
  end
  for _, outcome in ipairs(OUTCOMES) do
    if data.outcome == outcome then return true end
  end
  return false
end

local folded, workers, again = {count = 0}, {}, {} -- again: micro-batch to the number of uncounted submissions

local function fold(entry, data, fields)
  local outcome = data.outcome
  if outcome == "accepted" or outcome == "duplicate" then
    local for_nothing = {}
    for _, micro_batch in ipairs(data.micro_batches) do for_nothing[micro_batch] = true end
    for _, some in ipairs({data.counted, data.late or {}}) do
      for _, micro_batch in ipairs(some) do for_nothing[micro_batch] = nil end
    end
    for micro_batch in pairs(for_nothing) do again[micro_batch] = (again[micro_batch] or 0) + 1 end
  end
  if outcome == "accepted" and refused[data.nonce] then outcome = "refused" end
  local of = workers[data.worker] or {bytes_up = 0, bytes_down = 0}
  workers[data.worker] = of
  of[outcome] = (of[outcome] or 0) + 1
  of.bytes_up, of.bytes_down = of.bytes_up + data.bytes_up, of.bytes_down + data.bytes_down
  folded = {count = folded.count + 1, first = folded.first or entry[1], last = entry[1], at = fields.at}
end

local stays = {} -- moved events that are not folded
for i = 1, moved do
  local kind, data, fields = read(entries[i])
  local is_new = is_after(entries[i][1], upto)
  if kind == "submission" and is_new and data and is_whole(data, fields) and not unsettled[data.nonce] then
    fold(entries[i], data, fields)
  else
    stays[#stays + 1] = entries[i]
  end
end

local function counts() -- JSON with all digits of numbers; cjson would write only 14
  local by_worker, by_micro_batch = {}, {}
  for worker, of in pairs(workers) do
    local each = {}
    for name, value in pairs(of) do each[#each + 1] = string.format('"%s":%.0f', name, value) end
    by_worker[#by_worker + 1] = cjson.encode(worker) .. ":{" .. table.concat(each, ",") .. "}"
  end
  for micro_batch, times in pairs(again) do
    by_micro_batch[#by_micro_batch + 1] = string.format("[%.0f,%d]", micro_batch, times)
  end
  return string.format('{"first":"%s","submissions":%d,"workers":{%s},"again":[%s]}', folded.first, folded.count,
    table.concat(by_worker, ","), table.concat(by_micro_batch, ","))
end

local last_ms, last_number = entries[moved][1]:match("^(%d+)-(%d+)$")
-- first, because it frees memory for the following writes
redis.call("XTRIM", events_key, "MINID", last_ms .. "-" .. string.format("%.0f", last_number + 1))
local function append_counts()
  redis.call("XADD", backlog_key, folded.last, "type", "folded", "at", folded.at, "data", counts())
  folded = {count = 0}
end
for _, entry in ipairs(stays) do
  if folded.count > 0 and is_after(entry[1], folded.last) then append_counts() end
  redis.call("XADD", backlog_key, entry[1], unpack(entry[2]))
end
if folded.count > 0 then append_counts() end
return moved
