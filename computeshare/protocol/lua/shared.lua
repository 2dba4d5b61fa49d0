-- shared.lua: functions for several scripts, prepended to the source of each script that calls one.

local function slice(values, from, step) -- the values from index `from` on, or every `step`-th of them
  local found = {}
  for i = from, #values, step or 1 do found[#found + 1] = values[i] end
  return found
end

-- what the names of a job's keys begin with. A script that only reads a key makes its name of this: whoever calls a
-- script needs the right to write each key that the caller names
local function job_of(key) return key:match("^(.*):") end

local function machine_of(worker) return worker:sub(1, 8) end -- all workers of an invited machine have this in common

local function machines_of(workers) -- the number of machines that these workers run on
  local known, count = {}, 0
  for _, worker in ipairs(workers) do
    if not known[machine_of(worker)] then count = count + 1 end
    known[machine_of(worker)] = true
  end
  return count
end

local function now_ms() -- milliseconds since the epoch by the server's clock
  local clock = redis.call("TIME")
  return clock[1] * 1000 + math.floor(clock[2] / 1000)
end

local function has_moved_on(round_key, fence_key, token, fence) -- whether the version or the fence is outdated
  return (redis.call("HGET", round_key, "token") or "") ~= token or redis.call("GET", fence_key) ~= fence
end

local function keep_staged(staged_key, key) -- raises, without any change, if the staged data expired
  redis.call("RENAME", staged_key, key)
  redis.call("PERSIST", key)
end

local function append_event(events_key, kind, data) -- data is JSON
  redis.call("XADD", events_key, "*", "type", kind, "at", now_ms(), "data", data)
end

local function wake(versions_key, field, value) -- all waiting workers of the job
  redis.call("XADD", versions_key, "MAXLEN", "16", "*", field, value)
end

local function wake_reducer(full_key, token)
  redis.call("DEL", full_key)
  redis.call("RPUSH", full_key, token)
end

-- once a version can be made, or what is offered may complete parts of its draft
local function wake_reducer_if_due(full_key, token, received_key, offers_key, needed, total)
  local received, offered = redis.call("HLEN", received_key), redis.call("HLEN", offers_key)
  if received >= needed or offered > 0 and received + offered >= total then wake_reducer(full_key, token) end
end

-- with a delay, micro-batches from `first` + `count` on are of the round after the current one
local function is_of_next_round(micro_batch, first, count) return tonumber(micro_batch) >= first + count end

local function delayed_base(is_early, current, base) -- with a delay: the version to compute on; `base`: the one before
  return (is_early or (base or "") == "") and current or base
end

-- limits in bytes, those of `computeshare/protocol/limits.py`: of ids and of events that workers write
local LONGEST_NAME, LONGEST_EVENT = 100, 65536

local function fields_of(event) -- a JSON object's text inside its braces; nil if too long or another value; may raise
  if #event > LONGEST_EVENT then return nil end
  cjson.decode(event)
  return event:match("^%s*{(.*)}%s*$")
end

local function object_of(said, known) -- a JSON object; `known` comes last, so that it overrides the sender's fields
  return "{" .. said .. (said:match("%S") and "," or "") .. known .. "}"
end

-- frees a session's leases: those on the micro-batches in the set `only`, or all; returns the freed micro-batches
local function free_leases(leases_key, backups_key, audits_key, free_key, session, only)
  local freed = {}
  for _, key in ipairs({leases_key, backups_key, audits_key}) do
    local held = redis.call("HGETALL", key)
    for i = 1, #held, 2 do
      if held[i + 1]:match("^[^|]*") == session and (not only or only[held[i]]) then
        redis.call("HDEL", key, held[i])
        if key == leases_key then
          redis.call("RPUSH", free_key, held[i])
          freed[#freed + 1] = held[i]
        end
      end
    end
  end
  return freed
end

local function is_after(a, b) -- whether a stream's id `a` is later than `b`
  local a_ms, a_number = a:match("^(%d+)-(%d+)$")
  local b_ms, b_number = b:match("^(%d+)-(%d+)$")
  if a_ms ~= b_ms then return tonumber(a_ms) > tonumber(b_ms) end
  return tonumber(a_number) > tonumber(b_number)
end
