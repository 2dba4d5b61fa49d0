-- take_over.lua: take the oldest inner state that a session has handed over, so that no other worker gets it. The worker
-- does not learn whose it was.
-- Returns 1, or 0 if there is none, or the worker has a newer session.
local sessions_key, handed_key, inner_key = KEYS[1], KEYS[2], KEYS[3]
local worker, session = ARGV[1], ARGV[2]

if redis.call("HGET", sessions_key, worker) ~= session then return 0 end
local inner = inner_key:match("^(.*:inner:)") -- JobKeys.inner
while true do
  local handed = redis.call("LPOP", handed_key)
  if not handed then return 0 end
  if redis.call("EXISTS", inner .. handed) == 1 then -- else it has expired
    redis.call("RENAME", inner .. handed, inner_key)
    return 1
  end
end
