-- refuse.lua: refuse an accepted micro-batch whose update failed the reducer's checks. The micro-batch is free again,
-- and a closed round is reopened. A submission is one strike, however many of its micro-batches are refused. The strikes
-- of all workers of a machine count together. With too many, all of these are banned from the job: their sessions end,
-- and no worker of the machine can join until a user lifts the ban.
-- Returns {number of machines that sent NaN or infinity for this micro-batch, how often it was sent with such values,
-- number of machines that sent such values for any micro-batch of the round, number of machines in the job}, or
-- {-1, -1, -1, -1} if the version or the fence is outdated or another submission was accepted (nothing is changed).
local round_key, fence_key, received_key, free_key, update_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local strikes_key, suspects_key, versions_key, events_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local banned_key, sessions_key, leases_key, backups_key = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local answers_key, audits_key, peers_key = KEYS[14], KEYS[15], KEYS[16]
local token, fence = ARGV[1], ARGV[2]
local micro_batch, worker = ARGV[3], ARGV[4] -- of the refused submission
local event = ARGV[5] -- JSON object; `strike` (true or false) is added below
local fault = ARGV[6] -- damaged: a strike; not_finite: a strike if other machines are there, until one of them sends
-- such values, too (then the strikes are taken back); lost: no strike
local banning_strikes = tonumber(ARGV[7])
local reason, nonce = ARGV[8], ARGV[9]

if has_moved_on(round_key, fence_key, token, fence) then return {-1, -1, -1, -1} end
local entry = redis.call("HGET", received_key, micro_batch)
if not entry or cjson.decode(entry).nonce ~= nonce then return {-1, -1, -1, -1} end
redis.call("HDEL", received_key, micro_batch)
redis.call("UNLINK", update_key)
redis.call("HDEL", round_key, "closed")
redis.call("RPUSH", free_key, micro_batch)
local there = machines_of(redis.call("HKEYS", sessions_key))
local nonce_sha1 = redis.sha1hex(nonce)
local place, answer = (redis.call("HGET", answers_key, nonce_sha1) or "0|"):match("^(%d+)|(.*)$")
local strike = fault ~= "lost" and answer ~= "refused"
local machines, times, senders = 0, 0, {}
if fault == "not_finite" then
  local known = redis.call("HGET", suspects_key, micro_batch)
  known = known and cjson.decode(known) or {}
  known[worker] = known[worker] or {times = 0, strikes = 0}
  known[worker].times = known[worker].times + 1
  local agreeing = {}
  for one, of in pairs(known) do agreeing[#agreeing + 1], times = one, times + of.times end
  machines = machines_of(agreeing)
  strike = strike and there > 1 and machines == 1
  if strike then known[worker].strikes = known[worker].strikes + 1 end
  for one, of in pairs(known) do
    if machines > 1 and of.strikes > 0 then
      redis.call("HINCRBY", strikes_key, machine_of(one), -of.strikes)
      append_event(events_key, "forgiven", cjson.encode({worker = one, strikes = of.strikes}))
      of.strikes = 0
    end
  end
  redis.call("HSET", suspects_key, micro_batch, cjson.encode(known))
  for _, suspects in ipairs(redis.call("HVALS", suspects_key)) do
    for suspect in pairs(cjson.decode(suspects)) do senders[#senders + 1] = suspect end
  end
end
if strike then
  redis.call("HSET", answers_key, nonce_sha1, place .. "|refused")
  local strikes = redis.call("HINCRBY", strikes_key, machine_of(worker), 1)
  local banned = strikes >= banning_strikes and redis.call("HKEYS", sessions_key) or {}
  if strikes >= banning_strikes then banned[#banned + 1] = worker end -- it may have left
  for _, one in ipairs(banned) do
    if machine_of(one) == machine_of(worker) and redis.call("HSETNX", banned_key, one, reason) == 1 then
      local newest = redis.call("HGET", sessions_key, one)
      redis.call("HDEL", sessions_key, one)
      redis.call("HDEL", peers_key, one)
      free_leases(leases_key, backups_key, audits_key, free_key, newest)
      append_event(events_key, "banned",
        cjson.encode({worker = one, session = newest or "", strikes = strikes, reason = reason}))
    end
  end
end
wake(versions_key, "freed", 1)
append_event(events_key, "refused", string.format('{"strike":%s,%s', tostring(strike), event:sub(2)))
return {machines, times, machines_of(senders), there}
