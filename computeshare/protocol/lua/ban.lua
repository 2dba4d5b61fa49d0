-- ban.lua: ban a worker from the job at once, as refuse.lua does after too many strikes.
-- Returns 1, or 0 if the version or the fence is outdated, or the worker was banned before (nothing is changed).
local round_key, fence_key, sessions_key, banned_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local strikes_key, leases_key, backups_key, free_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local versions_key, events_key, audits_key, peers_key = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local token, fence = ARGV[1], ARGV[2]
local worker, reason = ARGV[3], ARGV[4]
local strikes = tonumber(ARGV[5]) -- as many as ban a machine

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
if redis.call("HSETNX", banned_key, worker, reason) == 0 then return 0 end
redis.call("HSET", strikes_key, machine_of(worker), strikes)
local newest = redis.call("HGET", sessions_key, worker) or ""
redis.call("HDEL", sessions_key, worker)
redis.call("HDEL", peers_key, worker)
if #free_leases(leases_key, backups_key, audits_key, free_key, newest) > 0 then wake(versions_key, "freed", 1) end
append_event(events_key, "banned",
  cjson.encode({worker = worker, session = newest, strikes = strikes, reason = reason}))
return 1
