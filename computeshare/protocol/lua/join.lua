-- join.lua: begin a worker's session in a job; an older session of the same worker is fenced and its leases freed,
-- which an event tells.
-- KEYS  1 round   2 sessions   3 seats   4 leases   5 backups   6 free   7 versions   8 events   9 banned
-- ARGV  1 worker   2 session   3 seat   4 event (JSON)
-- Returns {status, last id of the versions stream}; status is `unopened` if the job is not open,
-- `fenced` if the worker was given no seat, or another by now, `banned` if its updates were refused too often (in these
-- cases nothing is changed).
cjson.decode(ARGV[4]) -- raises, with no effect, on anything but JSON
local said = ARGV[4]:match("^%s*{(.*)}%s*$")
if not said then return redis.error_reply("a session's event is a JSON object") end
local status = redis.call("HGET", KEYS[1], "status")
local last = redis.call("XREVRANGE", KEYS[7], "+", "-", "COUNT", 1)
last = last[1] and last[1][1] or "0-0"
if not status then return {"unopened", last} end
local seat = redis.call("HGET", KEYS[3], ARGV[1])
if seat ~= ARGV[3] then return {"fenced", last} end
if status ~= "running" then return {status, last} end
if redis.call("HEXISTS", KEYS[9], ARGV[1]) == 1 then return {"banned", last} end
local former = redis.call("HGET", KEYS[2], ARGV[1])
local now = redis.call("TIME")
local at = now[1] * 1000 + math.floor(now[2] / 1000)
if former then
  local freed = {}
  for _, key in ipairs({KEYS[4], KEYS[5]}) do
    local held = redis.call("HGETALL", key)
    for i = 1, #held, 2 do
      if held[i + 1]:match("^[^|]*") == former then
        redis.call("HDEL", key, held[i])
        if key == KEYS[4] then
          redis.call("RPUSH", KEYS[6], held[i])
          freed[#freed + 1] = held[i]
        end
      end
    end
  end
  if #freed > 0 then
    local about = cjson.encode({worker = ARGV[1], session = former, reason = "a newer session has taken over"})
    redis.call("XADD", KEYS[8], "*", "type", "left", "at", at, "data",
      string.format('{"freed":[%s],%s', table.concat(freed, ","), about:sub(2)))
    redis.call("XADD", KEYS[7], "MAXLEN", "16", "*", "freed", #freed)
  end
end
redis.call("HSET", KEYS[2], ARGV[1], ARGV[2])
local known = string.format('"worker":%s,"session":%s,"seat":%s', -- comes last, so that it holds whatever the worker says
  cjson.encode(ARGV[1]), cjson.encode(ARGV[2]), cjson.encode(ARGV[3]))
redis.call("XADD", KEYS[8], "*", "type", "joined", "at", at, "data",
  "{" .. said .. (said:match("%S") and "," or "") .. known .. "}")
return {status, last}
