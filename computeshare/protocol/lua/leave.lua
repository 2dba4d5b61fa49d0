-- leave.lua: end a worker's session and free what it had leased.
-- KEYS  1 round   2 sessions   3 leases   4 backups   5 free   6 versions   7 events
-- ARGV  1 worker   2 session, or * for whichever it has   3 event without its session (JSON object)
-- Returns the number of micro-batches freed, or -1 if the session was not (any more) the worker's (nothing is changed).
local session = redis.call("HGET", KEYS[2], ARGV[1])
if not session or (ARGV[2] ~= "*" and ARGV[2] ~= session) then return -1 end
local data = cjson.decode(ARGV[3])
data.worker, data.session, data.freed = ARGV[1], session, nil -- these are not the caller's to say
redis.call("HDEL", KEYS[2], ARGV[1])
local freed = {}
if redis.call("EXISTS", KEYS[1]) == 1 then
  for _, key in ipairs({KEYS[3], KEYS[4]}) do
    local held = redis.call("HGETALL", key)
    for i = 1, #held, 2 do
      if held[i + 1]:match("^[^|]*") == session then
        redis.call("HDEL", key, held[i])
        if key == KEYS[3] then
          redis.call("RPUSH", KEYS[5], held[i])
          freed[#freed + 1] = held[i]
        end
      end
    end
  end
  if #freed > 0 then redis.call("XADD", KEYS[6], "MAXLEN", "16", "*", "freed", #freed) end
end
local now = redis.call("TIME")
redis.call("XADD", KEYS[7], "*", "type", "left", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data",
  string.format('{"freed":[%s],%s', table.concat(freed, ","), cjson.encode(data):sub(2)))
return #freed
