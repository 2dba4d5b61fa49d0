-- take.lua: read a job's events after a position, and note up to where: what may have been read is not folded any more.
-- KEYS  1 events   2 backlog   3 taken
-- ARGV  1 position (an id)   2 most events
-- Returns the events, oldest first, as XRANGE does.
local function is_after(a, b) -- of two ids
  local a_ms, a_number = a:match("^(%d+)-(%d+)$")
  local b_ms, b_number = b:match("^(%d+)-(%d+)$")
  if a_ms ~= b_ms then return tonumber(a_ms) > tonumber(b_ms) end
  return tonumber(a_number) > tonumber(b_number)
end

local found = redis.call("XRANGE", KEYS[2], "(" .. ARGV[1], "+", "COUNT", ARGV[2])
if #found < tonumber(ARGV[2]) then
  for _, entry in ipairs(redis.call("XRANGE", KEYS[1], "(" .. ARGV[1], "+", "COUNT", ARGV[2] - #found)) do
    found[#found + 1] = entry
  end
end
if #found > 0 and is_after(found[#found][1], redis.call("HGET", KEYS[3], "upto") or "0-0") then
  redis.call("HDEL", KEYS[3], "upto") -- needs no memory, so that the next goes through where there is none left
  redis.call("HSET", KEYS[3], "upto", found[#found][1])
end
return found
