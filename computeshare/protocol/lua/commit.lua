-- commit.lua: publish the next version, unless the version or the fence has moved on.
-- KEYS  1 round   2 fence   3 staged weights   4 next weights   5 weights before the base's   6 leases   7 backups
--       8 received   9 free   10 suspects   11 versions   12 events   13 full   14 arrivals   15 state of the base
--       16 recent   17 chain   18 staged whole weights   19 next whole weights   20 news of the base   21 news of the next
--       version   then what the chain lets go of
-- ARGV  1 token the round started from   2 next token   3 this reducer's fence   4 next version
--       5 next round's first micro-batch   6 its count   7 event (JSON object with any key), to which the script adds
--       which micro-batches were leased a second time
--       8 micro-batches that made the version, by commas   9 sha1 of their entries in `received`, one after the other
--       10 micro-batches carried into the next round, by commas   11 how many leases that round gives out in all (0 after the last)
--       12 how many of them make the version after the next
--       13 tokens that the micro-batches in 8 were computed on, by commas; empty: the base
--       14 `delta` if what is staged is the difference from the base, else `whole`
--       15 how many versions of the chain stay before this one, where it is published whole, too; else empty
--       16 micro-batches of each unit of the next round, by commas; empty: as the job's plan has it
--       17 the workers that these were made for, by commas   18 whether what is staged is to be news, too (1 or 0)
-- Where the next round is the same window of micro-batches, what is leased or received of it and not counted stays.
-- Returns 1 if published, 0 if the version, the fence or the job had moved on, or if the broker went back and
-- does not hold what was reduced, or the state to repeat it from, any more (nothing is changed).
local round = redis.call("HMGET", KEYS[1], "token", "status", "first", "count", "recent", "needed", "total", "sizes", "doubled")
if round[1] ~= ARGV[1] or redis.call("GET", KEYS[2]) ~= ARGV[3] then return 0 end
if round[2] ~= "running" and round[2] ~= "paused" then return 0 end
local stays = round[3] == ARGV[5] and round[4] == ARGV[6]
local counted = {}
for micro_batch in ARGV[8]:gmatch("%d+") do counted[#counted + 1] = micro_batch end
if round[6] == round[7] and redis.call("HLEN", KEYS[8]) ~= #counted then return 0 end
local entries = redis.call("HMGET", KEYS[8], unpack(counted))
for i, entry in ipairs(entries) do entries[i] = entry or "" end
if redis.sha1hex(table.concat(entries)) ~= ARGV[9] or redis.call("EXISTS", KEYS[15]) == 0 then return 0 end

local function deadline() -- of the next round, in milliseconds after its opening: median plus four deviations; 0: unknown
  local arrivals = redis.call("SORT", KEYS[14]) -- table.sort takes five times as long
  if #arrivals < 8 then return 0 end
  for i, arrival in ipairs(arrivals) do arrivals[i] = tonumber(arrival) end
  local upper = math.floor(#arrivals / 2) + 1
  local odd = #arrivals % 2 == 1
  local median = odd and arrivals[upper] or (arrivals[upper - 1] + arrivals[upper]) / 2
  local below, above = upper - 1, upper -- the deviations from it grow from here to both sides
  local before, deviation = 0, 0
  for _ = 1, upper do
    before = deviation
    local down = below > 0 and median - arrivals[below] or math.huge
    local up = above <= #arrivals and arrivals[above] - median or math.huge
    deviation = math.min(down, up)
    if down < up then below = below - 1 else above = above + 1 end
  end
  if not odd then deviation = (before + deviation) / 2 end
  return median + 4 * math.max(deviation, 0.1 * median, 5)
end

if ARGV[15] ~= "" then
  redis.call("RENAME", KEYS[18], KEYS[19]) -- these raise, with no effect that matters, if the staging expired
  redis.call("PERSIST", KEYS[19])
end
redis.call("RENAME", KEYS[3], KEYS[4])
redis.call("PERSIST", KEYS[4])
redis.call("UNLINK", KEYS[20])
if ARGV[18] == "1" then redis.call("COPY", KEYS[4], KEYS[21], "REPLACE") end
if ARGV[14] == "delta" then
  if ARGV[15] ~= "" then
    redis.call("LTRIM", KEYS[17], -tonumber(ARGV[15]), -1)
    redis.call("HSET", KEYS[1], "snapshot", ARGV[2])
    for i = 22, #KEYS do redis.call("UNLINK", KEYS[i]) end
  end
  redis.call("RPUSH", KEYS[17], ARGV[2])
end
local now = redis.call("TIME")
redis.call("HSET", KEYS[1], "token", ARGV[2], "base", ARGV[1], "version", ARGV[4], "first", ARGV[5], "count", ARGV[6],
  "counted", ARGV[8], "bases", ARGV[13], "carried", ARGV[10], "total", ARGV[11], "needed", ARGV[12], "deadline", deadline(),
  "sizes", ARGV[16], "owners", ARGV[17], "sizes_before", round[8] or "", "opened", now[1] * 1000 + math.floor(now[2] / 1000))
redis.call("HDEL", KEYS[1], "closed", "doubted", "doubled")
if ARGV[11] == "0" then redis.call("HSET", KEYS[1], "status", "finished") end
redis.call("DEL", KEYS[13])
if stays then
  redis.call("HDEL", KEYS[10], unpack(counted))
  redis.call("HDEL", KEYS[8], unpack(counted))
  if redis.call("HLEN", KEYS[8]) >= tonumber(ARGV[12]) then redis.call("RPUSH", KEYS[13], ARGV[2]) end
else
  redis.call("HSET", KEYS[1], "cursor", "0")
  redis.call("DEL", KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10])
  if ARGV[16] ~= "" then -- each unit is to go to whom it was made for, so none is given out in turn
    redis.call("HSET", KEYS[1], "cursor", ARGV[6])
    for i = 0, tonumber(ARGV[6]) - 1 do redis.call("RPUSH", KEYS[9], string.format("%d", ARGV[5] + i)) end
  end
  for micro_batch in ARGV[10]:gmatch("%d+") do redis.call("RPUSH", KEYS[9], micro_batch) end
end
redis.call("LPUSH", KEYS[16], ARGV[2])
redis.call("LTRIM", KEYS[16], 0, tonumber(round[5]) - 1)
redis.call("UNLINK", KEYS[5])
redis.call("XADD", KEYS[11], "MAXLEN", "16", "*", "token", ARGV[2])
redis.call("XADD", KEYS[12], "*", "type", "version", "at", now[1] * 1000 + math.floor(now[2] / 1000), "data",
  round[9] and string.format('{"doubled":[%s],%s', round[9], ARGV[7]:sub(2)) or ARGV[7])
return 1
