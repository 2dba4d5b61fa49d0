-- commit.lua: publish the next version, unless the version or the fence is outdated.
-- If the next round has the same window of micro-batches, their leases and uncounted updates stay; with `delay`, leases,
-- updates and offers for the next round do, too, and become those of the current one.
-- Returns 1 if published; 0 if the version or the fence is outdated, the rounds have ended, or the broker lost the
-- reduced updates, the state from which to repeat the steps since, or a part of the draft (nothing is changed).
local round_key, fence_key, staged_weights_key = KEYS[1], KEYS[2], KEYS[3]
local next_weights_key, outdated_weights_key = KEYS[4], KEYS[5] -- outdated: those of the version before the base
local leases_key, backups_key, received_key, free_key, suspects_key = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local versions_key, events_key, full_key = KEYS[11], KEYS[12], KEYS[13]
local stored_state_key, recent_key, chain_key = KEYS[14], KEYS[15], KEYS[16] -- stored: the newest state
local staged_snapshot_key, snapshot_key = KEYS[17], KEYS[18] -- whole weights of the next version
local base_news_key, next_news_key = KEYS[19], KEYS[20] -- news of the base and of the next version
local audits_key, copies_key, disputes_key = KEYS[21], KEYS[22], KEYS[23]
local early_key = KEYS[24] -- what the next round has received
local offers_key, early_offers_key, steps_key = KEYS[25], KEYS[26], KEYS[27]
local outdated_keys = slice(KEYS, 28) -- snapshots, differences, and copies of carried units' updates, to delete
local token, next_token, fence = ARGV[1], ARGV[2], ARGV[3] -- token: of the version from which the round started
local next_version, next_first, next_count = ARGV[4], ARGV[5], ARGV[6] -- first micro-batch, and their number
local event = ARGV[7] -- non-empty JSON object; `doubled` is added below
local counted = ARGV[8] -- micro-batches that made the version, separated by commas
local entries_sha1 = ARGV[9] -- SHA-1 of their concatenated entries in `received`
local carried = ARGV[10] -- micro-batches carried into the next round, separated by commas
local next_total = ARGV[11] -- number of micro-batches in the next round; 0 after the last round
local next_needed = ARGV[12] -- how many of them the version after the next needs
local bases = ARGV[13] -- tokens on which the counted micro-batches were computed, separated by commas; empty: the base
local published_as = ARGV[14] -- `delta` if the staged weights are the difference from the base, else `whole`
local kept = ARGV[15] -- number of earlier versions that stay in the chain, if this one is also a snapshot; else empty
local has_news = ARGV[16] -- 1 if the staged weights are also published as news; else 0
local next_ahead = ARGV[17] -- with `delay`, the number of micro-batches in the round after the next one; else 0
local draft, draft_parts = ARGV[18], ARGV[19] -- if the staged weights are a draft: its name, and its number of parts

if has_moved_on(round_key, fence_key, token, fence) then return 0 end
local status, first, count, recent, needed, total, doubled, delay, ahead_cursor = unpack(redis.call("HMGET", round_key,
  "status", "first", "count", "recent", "needed", "total", "doubled", "delay", "ahead_cursor"))
if status ~= "running" and status ~= "paused" then return 0 end
local stays = first == next_first and count == next_count
local units = {}
for micro_batch in counted:gmatch("%d+") do units[#units + 1] = micro_batch end
if needed == total and redis.call("HLEN", received_key) ~= #units then return 0 end
local entries = redis.call("HMGET", received_key, unpack(units))
for i, entry in ipairs(entries) do entries[i] = entry or "" end
if redis.sha1hex(table.concat(entries)) ~= entries_sha1 or redis.call("EXISTS", stored_state_key) == 0 then return 0 end
if draft ~= "" and redis.call("HLEN", staged_weights_key) ~= tonumber(draft_parts) then return 0 end

-- these raise if the staged data expired; nothing that matters has changed by then
if kept ~= "" then keep_staged(staged_snapshot_key, snapshot_key) end
keep_staged(staged_weights_key, next_weights_key)
redis.call("UNLINK", base_news_key)
if has_news == "1" then redis.call("COPY", next_weights_key, next_news_key, "REPLACE") end
if published_as == "delta" then
  if kept ~= "" then
    redis.call("LTRIM", chain_key, -tonumber(kept), -1)
    redis.call("HSET", round_key, "snapshot", next_token)
  end
  redis.call("RPUSH", chain_key, next_token)
end
redis.call("HSET", round_key, "token", next_token, "base", token, "version", next_version, "first", next_first,
  "count", next_count, "carried", carried, "total", next_total, "needed", next_needed, "ahead", next_ahead,
  "opened", now_ms())
redis.call("RPUSH", steps_key, token .. "|" .. counted .. "|" .. bases)
redis.call("HDEL", round_key, "closed", "doubted", "doubters", "doubled", "draft")
if draft ~= "" then redis.call("HSET", round_key, "draft", draft) end
redis.call("DEL", offers_key)
if next_total == "0" then redis.call("HSET", round_key, "status", "finished") end
redis.call("DEL", full_key)
if stays then
  redis.call("HDEL", suspects_key, unpack(units))
  redis.call("HDEL", received_key, unpack(units))
elseif delay == "1" then
  redis.call("HSET", round_key, "cursor", ahead_cursor, "ahead_cursor", "0")
  for _, key in ipairs({suspects_key, audits_key, copies_key, disputes_key}) do
    redis.call("HDEL", key, unpack(units))
  end
  redis.call("DEL", received_key)
  if redis.call("EXISTS", early_key) == 1 then redis.call("RENAME", early_key, received_key) end
  if redis.call("EXISTS", early_offers_key) == 1 then redis.call("RENAME", early_offers_key, offers_key) end
else
  redis.call("HSET", round_key, "cursor", "0")
  redis.call("DEL", leases_key, backups_key, received_key, free_key, suspects_key, audits_key, copies_key, disputes_key)
  for micro_batch in carried:gmatch("%d+") do redis.call("RPUSH", free_key, micro_batch) end
end
if next_total ~= "0" then
  wake_reducer_if_due(full_key, next_token, received_key, offers_key, tonumber(next_needed), tonumber(next_total))
end
redis.call("LPUSH", recent_key, next_token)
redis.call("LTRIM", recent_key, 0, tonumber(recent) - 1)
redis.call("UNLINK", outdated_weights_key)
for _, key in ipairs(outdated_keys) do redis.call("UNLINK", key) end
wake(versions_key, "token", next_token)
append_event(events_key, "version", doubled and string.format('{"doubled":[%s],%s', doubled, event:sub(2)) or event)
return 1
