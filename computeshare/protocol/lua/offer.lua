-- offer.lua: note that parts of an update are staged before the update is submitted, and wake the reducer once one of them
-- is staged, or received, for every micro-batch of the round. With `delay`, offers for the next round wait apart.
-- Returns 1, or 0 if the update is not computed on the version that its round asks for, or the session has no lease on the
-- micro-batch (nothing is changed).
local round_key, leases_key, offers_key = KEYS[1], KEYS[2], KEYS[3]
local received_key, full_key = KEYS[4], KEYS[5]
local early_offers_key = KEYS[6]
local token, worker, session, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local micro_batch = ARGV[5]
local parts = slice(ARGV, 6) -- their indices

if #nonce > LONGEST_NAME then return redis.error_reply("a submission's nonce has at most 100 characters") end
local status, current, total, most, delay, base, first, count = unpack(redis.call("HMGET", round_key, "status", "token",
  "total", "parts", "delay", "base", "first", "count"))
local is_early = delay == "1" and is_of_next_round(micro_batch, first, count)
local computed_on = delay == "1" and delayed_base(is_early, current, base) or current
if status ~= "running" or token ~= computed_on then return 0 end
local holder, lessee = (redis.call("HGET", leases_key, micro_batch) or ""):match("^(.-)|.-|.-|(.*)$")
if holder ~= session or lessee ~= worker then return 0 end

local own = worker .. "|" .. nonce .. "|,"
local place_key = is_early and early_offers_key or offers_key
local offer = redis.call("HGET", place_key, micro_batch) or ""
if offer:sub(1, #own) ~= own then offer = own end -- another worker had the lease before
for _, part in ipairs(parts) do
  local is_part = tonumber(part) < tonumber(most)
  if is_part and not offer:find("," .. part .. ",", 1, true) then offer = offer .. part .. "," end
end
redis.call("HSET", place_key, micro_batch, offer)
if is_early then return 1 end
if redis.call("HLEN", offers_key) + redis.call("HLEN", received_key) < tonumber(total) then return 1 end
local offers = redis.call("HVALS", offers_key)
for _, part in ipairs(parts) do
  local is_everywhere = true
  for _, each in ipairs(offers) do
    is_everywhere = is_everywhere and each:find("," .. part .. ",", 1, true) ~= nil
  end
  if is_everywhere then
    wake_reducer(full_key, current)
    return 1
  end
end
return 1
