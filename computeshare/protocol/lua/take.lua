-- take.lua: read a job's events after a position, and note how far: events that may have been read are never folded.
-- Returns the events, oldest first, as XRANGE does.
local events_key, backlog_key, taken_key = KEYS[1], KEYS[2], KEYS[3]
local position, most = ARGV[1], tonumber(ARGV[2]) -- a stream id; the most events to return

local found = redis.call("XRANGE", backlog_key, "(" .. position, "+", "COUNT", most)
if #found < most then
  for _, entry in ipairs(redis.call("XRANGE", events_key, "(" .. position, "+", "COUNT", most - #found)) do
    found[#found + 1] = entry
  end
end
if #found > 0 and is_after(found[#found][1], redis.call("HGET", taken_key, "upto") or "0-0") then
  redis.call("HDEL", taken_key, "upto") -- frees memory, so that the next command works in a full broker
  redis.call("HSET", taken_key, "upto", found[#found][1])
end
return found
