-- hand_over.lua: offer the inner state that a session has stored to a worker that joins later. Of each worker only the
-- newest is offered, and of all workers the newest 256.
-- Returns 1, or 0 if the worker has a newer session (nothing is changed).
local sessions_key, handed_key = KEYS[1], KEYS[2]
local worker, session = ARGV[1], ARGV[2]

local MOST = 256
if redis.call("HGET", sessions_key, worker) ~= session then return 0 end
for _, offered in ipairs(redis.call("LRANGE", handed_key, 0, -1)) do
  if offered:match("^[^:]*") == worker then redis.call("LREM", handed_key, 0, offered) end
end
redis.call("RPUSH", handed_key, worker .. ":" .. session)
redis.call("LTRIM", handed_key, -MOST, -1)
return 1
