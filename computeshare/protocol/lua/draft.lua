-- draft.lua: tell the workers that a part of the next version can be read from a draft.
-- Returns 1, or 0 if the version or the fence is outdated (nothing is changed).
local round_key, fence_key, drafts_key = KEYS[1], KEYS[2], KEYS[3]
local token, fence = ARGV[1], ARGV[2]
local draft, part = ARGV[3], ARGV[4] -- its name, and the index of a part that is there

local DRAFTED = 512 -- entries kept
if has_moved_on(round_key, fence_key, token, fence) then return 0 end
redis.call("XADD", drafts_key, "MAXLEN", DRAFTED, "*", "token", token, "name", draft, "part", part)
return 1
