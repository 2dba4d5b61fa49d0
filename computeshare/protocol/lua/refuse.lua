-- refuse.lua: take back an accepted micro-batch whose blob failed the reducer's checks; it is free again, and a
-- closed round open. A submission is one strike, however many of its micro-batches are refused. A worker with too
-- many strikes is banned from the job: its session ends, and it cannot join until somebody lifts that.
-- KEYS  1 round   2 fence   3 received   4 free   5 update   6 strikes   7 suspects   8 versions   9 events
--       10 banned   11 sessions   12 leases   13 backups   14 answers
-- ARGV  1 token   2 this reducer's fence   3 micro-batch   4 worker   5 session   6 event without its strike (JSON object)
--       7 what was wrong: damaged (the sender's fault), not_finite (the sender's where others are there, until one of
--       them agrees, which takes the strikes for it back) or lost (nobody's)
--       8 strikes that ban   9 reason   10 nonce
-- Returns {sessions that sent this micro-batch not finite, times it was sent so, sessions that sent any of the round so,
-- sessions there are}, or {-1, -1, -1, -1} if the version or the fence had moved on or another submission took its place
-- (nothing is changed).
if redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[2] then return {-1, -1, -1, -1} end
local entry = redis.call("HGET", KEYS[3], ARGV[3])
if not entry or cjson.decode(entry).nonce ~= ARGV[10] then return {-1, -1, -1, -1} end
redis.call("HDEL", KEYS[3], ARGV[3])
redis.call("UNLINK", KEYS[5])
redis.call("HDEL", KEYS[1], "closed")
redis.call("RPUSH", KEYS[4], ARGV[3])
local now = redis.call("TIME")
local at = now[1] * 1000 + math.floor(now[2] / 1000)
local there = redis.call("HLEN", KEYS[11])
local nonce = redis.sha1hex(ARGV[10])
local place, answer = (redis.call("HGET", KEYS[14], nonce) or "0|"):match("^(%d+)|(.*)$")
local strike = ARGV[7] ~= "lost" and answer ~= "refused"
local sessions, times, senders = 0, 0, {}
if ARGV[7] == "not_finite" then
  local known = redis.call("HGET", KEYS[7], ARGV[3])
  known = known and cjson.decode(known) or {}
  local mine = known[ARGV[5]] or {worker = ARGV[4], times = 0, strikes = 0}
  known[ARGV[5]] = mine
  mine.times = mine.times + 1
  for _, one in pairs(known) do sessions, times = sessions + 1, times + one.times end
  strike = strike and there > 1 and sessions == 1
  if strike then mine.strikes = mine.strikes + 1 end
  for _, one in pairs(known) do
    if sessions > 1 and one.strikes > 0 then
      redis.call("HINCRBY", KEYS[6], one.worker, -one.strikes)
      redis.call("XADD", KEYS[9], "*", "type", "forgiven", "at", at,
        "data", cjson.encode({worker = one.worker, strikes = one.strikes}))
      one.strikes = 0
    end
  end
  redis.call("HSET", KEYS[7], ARGV[3], cjson.encode(known))
  for _, suspects in ipairs(redis.call("HVALS", KEYS[7])) do
    for session in pairs(cjson.decode(suspects)) do senders[session] = true end
  end
end
if strike then
  redis.call("HSET", KEYS[14], nonce, place .. "|refused")
  local strikes = redis.call("HINCRBY", KEYS[6], ARGV[4], 1)
  if strikes >= tonumber(ARGV[8]) and redis.call("HSETNX", KEYS[10], ARGV[4], ARGV[9]) == 1 then
    local session = redis.call("HGET", KEYS[11], ARGV[4])
    redis.call("HDEL", KEYS[11], ARGV[4])
    for i = 12, 13 do
      local held = redis.call("HGETALL", KEYS[i])
      for j = 1, #held, 2 do
        if held[j + 1]:match("^[^|]*") == session then
          redis.call("HDEL", KEYS[i], held[j])
          if i == 12 then redis.call("RPUSH", KEYS[4], held[j]) end
        end
      end
    end
    redis.call("XADD", KEYS[9], "*", "type", "banned", "at", at,
      "data", cjson.encode({worker = ARGV[4], session = session or "", strikes = strikes, reason = ARGV[9]}))
  end
end
redis.call("XADD", KEYS[8], "MAXLEN", "16", "*", "freed", 1)
redis.call("XADD", KEYS[9], "*", "type", "refused", "at", at,
  "data", string.format('{"strike":%s,%s', tostring(strike), ARGV[6]:sub(2)))
local distinct = 0
for _ in pairs(senders) do distinct = distinct + 1 end
return {sessions, times, distinct, there}
