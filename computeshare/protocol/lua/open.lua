-- open.lua: publish a job's first weights, new or restored, unless the job is open already.
-- Returns 1 if opened, 0 if the job is open or gone or the fence is outdated (nothing is changed).
local round_key, fence_key, staged_weights_key, weights_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local staged_state_key, state_key, versions_key, events_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local spec_key, free_key, recent_key, chain_key = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local staged_base_key, base_weights_key = KEYS[13], KEYS[14] -- weights of the version before
local steps_key = KEYS[15]
local fence, token, version = ARGV[1], ARGV[2], ARGV[3]
local first, count = ARGV[4], ARGV[5] -- the round's first micro-batch, and their number
local event = ARGV[6] -- JSON
local carried = ARGV[7] -- micro-batches carried into this round, separated by commas
local total = ARGV[8] -- number of micro-batches in the round; 0 if all rounds are done
local needed = ARGV[9] -- how many of them the next version needs
local recent = ARGV[10] -- number of versions, with the current one, whose updates count
local base = ARGV[11] -- token of the version before, on which the round's units are computed; empty: on this version
local ahead = ARGV[12] -- with `delay`, the number of micro-batches in the next round; else 0
local term_names, term_values = slice(ARGV, 13, 2), slice(ARGV, 14, 2) -- rules for leases and submissions

if redis.call("EXISTS", round_key) == 1 or redis.call("EXISTS", spec_key) == 0 then return 0 end
if redis.call("GET", fence_key) ~= fence then return 0 end
keep_staged(staged_weights_key, weights_key) -- first write
keep_staged(staged_state_key, state_key)
if base ~= "" then keep_staged(staged_base_key, base_weights_key) end
redis.call("HSET", round_key, "status", total == "0" and "finished" or "running", "token", token, "base", base,
  "version", version, "first", first, "count", count, "carried", carried, "total", total, "cursor", "0",
  "ahead", ahead, "ahead_cursor", "0", "needed", needed, "recent", recent, "snapshot", token, "opened", now_ms())
for i, name in ipairs(term_names) do redis.call("HSET", round_key, name, term_values[i]) end
for micro_batch in carried:gmatch("%d+") do redis.call("RPUSH", free_key, micro_batch) end
redis.call("DEL", recent_key, chain_key, steps_key)
if base ~= "" then
  redis.call("LPUSH", recent_key, base)
  redis.call("RPUSH", chain_key, base)
end
redis.call("LPUSH", recent_key, token)
redis.call("RPUSH", chain_key, token)
wake(versions_key, "token", token)
append_event(events_key, "opened", event)
return 1
