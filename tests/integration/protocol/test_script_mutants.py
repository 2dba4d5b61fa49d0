"""Every check in the scripts is needed, and some test says so: each mutant has one check taken out or altered.

A run tries a sample of COMPUTESHARE_MUTANTS (12) mutants, another one for each commit. It tries all mutants if the
newest commit changed the protocol; so does `make chaos`.
"""

import json
import os
import subprocess
import sys

import pytest

from computeshare.protocol.scripts import script
from tests.support import lua, sample

VERSION_MOVED_ON = '(redis.call("HGET", round_key, "token") or "") ~= token or'
FENCE_MOVED_ON = 'or redis.call("GET", fence_key) ~= fence'
PERSISTED = 'redis.call("PERSIST", key)'
HELD = ':match("^[^|]*") == session'
FORGOTTEN = (
    "leases_key",
    "backups_key",
    "received_key",
    "free_key",
    "suspects_key",
    "audits_key",
    "copies_key",
    "disputes_key",
)
"""What a commit deletes where the next round is of other micro-batches."""

CHANGES: dict[str, list[tuple[str, str]]] = {
    "ban": [
        ('redis.call("HDEL", peers_key, worker)', ""),
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ('if redis.call("HSETNX", banned_key, worker, reason) == 0 then return 0 end', ""),
        ('redis.call("HSET", strikes_key, worker, strikes)', ""),
        ('redis.call("HDEL", sessions_key, worker)', ""),
        ("if #free_leases(leases_key, backups_key, audits_key, free_key, newest) > 0 then", "if false then"),
    ],
    "dispute": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ("or cjson.decode(entry).nonce ~= nonce", ""),
        ('redis.call("HDEL", received_key, micro_batch)', ""),
        ('redis.call("HDEL", copies_key, micro_batch)', ""),
        ('redis.call("UNLINK", update_key, update_key .. ":copy")', ""),
        ('redis.call("HDEL", round_key, "closed")', ""),
        ('redis.call("RPUSH", free_key, micro_batch)', ""),
        ('wake(versions_key, "freed", 1)', ""),
    ],
    "announce": [
        ('if redis.call("EXISTS", spec_key) == 0 then return 0 end', ""),
        ('fence ~= "" and redis.call("GET", fence_key) ~= fence', "false"),
    ],
    "claim": [
        ('if redis.call("EXISTS", spec_key) == 0 then return 0 end', ""),
        ('if redis.call("EXISTS", reducer_key) == 1 then', "if false then"),
        ('redis.call("PEXPIRE", reducer_key, life_ms, "LT")', ""),
        ('redis.call("PEXPIRE", reducer_key, life_ms, "LT")', 'redis.call("PEXPIRE", reducer_key, life_ms)'),
        (
            'math.max((tonumber(redis.call("GET", fence_key)) or 0) + 1, clock[1] * 1000000 + clock[2])',
            'tonumber(redis.call("GET", fence_key) or clock[1])',
        ),
        (
            'math.max((tonumber(redis.call("GET", fence_key)) or 0) + 1, clock[1] * 1000000 + clock[2])',
            '(tonumber(redis.call("GET", fence_key)) or 0) + 1',
        ),
    ],
    "commit": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ('if status ~= "running" and status ~= "paused" then return 0 end', ""),
        ('redis.call("UNLINK", base_news_key)', ""),
        ('if has_news == "1" then redis.call("COPY", next_weights_key, next_news_key, "REPLACE") end', ""),
        (
            'if has_news == "1" then redis.call("COPY", next_weights_key, next_news_key, "REPLACE") end',
            'redis.call("COPY", next_weights_key, next_news_key, "REPLACE")',
        ),
        ('redis.call("HSET", round_key, "cursor", "0")', ""),
        ('if next_total == "0" then', "if false then"),
        ('if next_total == "0" then', 'if next_count == "0" then'),
        ('redis.call("HDEL", suspects_key, unpack(units))', ""),
        ('redis.call("HDEL", suspects_key, unpack(units))', 'redis.call("DEL", suspects_key)'),
        ('if needed == total and redis.call("HLEN", received_key) ~= #units then return 0 end', ""),
        ('if needed == total and redis.call("HLEN", received_key) ~=', 'if redis.call("HLEN", received_key) ~='),
        ("first == next_first and count == next_count", "false"),
        ('redis.call("HDEL", received_key, unpack(units))', ""),
        ('if redis.call("HLEN", received_key) >= tonumber(next_needed) then', "if false then"),
        ('redis.call("LPUSH", recent_key, next_token)', ""),
        ('redis.call("LTRIM", recent_key, 0, tonumber(recent) - 1)', ""),
        ('redis.call("LTRIM", chain_key, -tonumber(kept), -1)', ""),
        ('redis.call("HSET", round_key, "snapshot", next_token)', ""),
        ('for _, key in ipairs(outdated_keys) do redis.call("UNLINK", key) end', ""),
        ("redis.sha1hex(table.concat(entries)) ~= entries_sha1 or", ""),
        ('or redis.call("EXISTS", base_state_key) == 0', ""),
        ("if #arrivals < 8 then return 0 end", "if #arrivals < 4 then return 0 end"),
        ("4 * math.max(deviation, 0.1 * median, 5)", "4 * math.max(deviation, 0.2 * median, 5)"),
        ("4 * math.max(deviation,", "4 * math.max("),
        ('redis.call("SORT", arrivals_key)', 'redis.call("LRANGE", arrivals_key, 0, -1)'),
        ("odd and arrivals[upper] or", ""),
        ("if not odd then deviation = (before + deviation) / 2 end", ""),
        ('for micro_batch in carried:gmatch("%d+") do redis.call("RPUSH", free_key, micro_batch) end', ""),
        ('"carried", carried, "total", next_total', '"carried", carried, "total", next_count'),
        (', "REPLACE")', ")"),
        ('round_key, "closed", "doubted", "doubters", "doubled")', 'round_key, "doubted", "doubters", "doubled")'),
        (
            'round_key, "closed", "doubted", "doubters", "doubled")',
            'round_key, "closed", "doubted", "doubters")',
        ),
        (
            'round_key, "closed", "doubted", "doubters", "doubled")',
            'round_key, "closed", "doubted", "doubled")',
        ),
        ("doubled and string.format", "false and string.format"),
        (PERSISTED, ""),
        *(
            (f'"DEL", {", ".join(FORGOTTEN)}', f'"DEL", {", ".join(key for key in FORGOTTEN if key != kept)}')
            for kept in FORGOTTEN
        ),
    ],
    "close": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ('if status ~= "running" or closed', "if closed"),
        ('if status ~= "running" or closed', 'if status ~= "running"'),
        ("if received < at_least then return 0 end", ""),
    ],
    "discard": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ('for _, key in ipairs(dropped_keys) do redis.call("UNLINK", key) end', ""),
    ],
    "doubt": [
        ('if redis.call("HGET", round_key, "token") ~= token then return 0 end', ""),
        ('if redis.call("HGET", sessions_key, worker) ~= session then return 0 end', ""),
        ("free_leases(leases_key, backups_key, audits_key, free_key, session) if redis.call", "if redis.call"),
        ('if redis.call("HGET", round_key, "doubted") == token then return 1 end', ""),
        ('if again == "1" then', "if true then"),
        ("if doubters:find(mark, 1, true) then return 1 end", ""),
        ('string.format("|%s%s|", again, worker)', "worker"),
        ('string.format("|%s%s|", again, worker)', "again"),
        ('redis.call("HSET", round_key, "doubted", token)', ""),
        ('redis.call("RPUSH", full_key, token)', ""),
        (HELD, ""),
    ],
    "fold": [
        ('if redis.call("GET", fence_key) ~= fence then return 0 end', ""),
        ("if taken[1] ~= run then", "if false then"),
        ("newest[1] and newest[1][1] or upto", "upto"),
        ('"run", run, "upto", upto)', '"upto", upto)'),
        ('if redis.call("XLEN", events_key) < kept + moved then return 0 end', ""),
        ("and not is_after(entries[1][1], before[i + 1]) then return 0 end", "and false then return 0 end"),
        ("unsettled[cjson.decode(entry).nonce] = true", ""),
        ("refused[data.nonce] = true", ""),
        ("or bytes >= 2 ^ 30", ""),
        ("#name > 100 or", ""),
        ('or name:find("[^\\32-\\126]")', ""),
        ("tonumber(fields.at) and", ""),
        ("is_token(data.base) and", ""),
        ("if not are_counts(data.late, true) then return false end", ""),
        ("for_nothing[micro_batch] = nil", ""),
        ("(again[micro_batch] or 0) + 1", "1"),
        ('if outcome == "accepted" and refused[data.nonce] then', "if false then"),
        ('kind == "submission" and is_new and', 'kind == "submission" and'),
        ("and not unsettled[data.nonce] then", "then"),
        ("local folded, workers, again = {count = 0}, {}, {}", "local folded, workers, again = {count = 1}, {}, {}"),
        ("folded.first or entry[1]", "entry[1]"),
        ("last = entry[1], at", "last = folded.last or entry[1], at"),
        ('redis.call("XTRIM", events_key, "MINID"', 'redis.call("XTRIM", backlog_key, "MINID"'),
    ],
    "take": [
        ("if #found < most then", "if false then"),
        ("most - #found)", "most)"),
        ('redis.call("XRANGE", backlog_key, "(" .. position, "+", "COUNT", most)', "{}"),
        ('is_after(found[#found][1], redis.call("HGET", taken_key, "upto") or "0-0")', "true"),
        ('redis.call("HSET", taken_key, "upto", found[#found][1])', ""),
    ],
    "place": [
        ('if not status then return {"gone", 0, "", "", "", {}} end', ""),
        ('redis.call("HGET", sessions_key, worker) ~= session then return {"fenced"', 'false then return {"fenced"'),
        ("if not fields_of(about) or", "if false and"),
        ('redis.call("HGET", sessions_key, member) == its_session and', ""),
        ("and tonumber(seen) > now - life_ms then", "then"),
        ('redis.call("HDEL", members_key, member)', ""),
        ("and current == number and", "and"),
        ("and there == present then", "then"),
        ('wake(versions_key, "placed", current)', ""),
    ],
    "release": [
        ('if redis.call("HGET", sessions_key, worker) ~= session then return -1 end', ""),
        ("if #freed > 0 then wake", "if false then wake"),
        (HELD, ""),
    ],
    "hand_over": [
        ('if redis.call("HGET", sessions_key, worker) ~= session then return 0 end', ""),
        ('if offered:match("^[^:]*") == worker then', "if false then"),
        ('if offered:match("^[^:]*") == worker then', "if true then"),
        ('redis.call("LTRIM", handed_key, -MOST, -1)', ""),
    ],
    "take_over": [
        ('if redis.call("HGET", sessions_key, worker) ~= session then return 0 end', ""),
        ('redis.call("LPOP", handed_key)', 'redis.call("LINDEX", handed_key, 0)'),
        ('if redis.call("EXISTS", inner .. handed) == 1 then', "if true then"),
        ('redis.call("RENAME", inner .. handed, inner_key)', ""),
    ],
    "finish": [
        ('if redis.call("EXISTS", round_key) == 0 then return 0 end', ""),
    ],
    "join": [
        ('if redis.call("HGET", seats_key, worker) ~= seat', "if false"),
        ('if status ~= "running" then return {status, last} end', ""),
        ("if former then", "if false then"),
        ("if machine_of(banned) == machine_of(worker) then", "if false then"),
        ("if machine_of(banned) == machine_of(worker) then", "if banned == worker then"),
        ('if (redis.call("HGET", round_key, "frozen") or "") ~= frozen then return {"unlike", last} end', ""),
        ("if audit > 0 and before and before ~= kind then", "if before and before ~= kind then"),
        ("if audit > 0 and before and before ~= kind then", "if audit > 0 and before ~= kind then"),
        ("if audit > 0 and before and before ~= kind then", "if audit > 0 and before then"),
        ("if audit > 0 and before and before ~= kind then", "if false then"),
        ("if #freed > 0 then", "if true then"),
        ('wake(versions_key, "freed", #freed)', ""),
        ("if not said then return", "said = said or '' if false then return"),
        ("if #session > LONGEST_NAME then", "if false then"),
        ("if #event > LONGEST_EVENT then return nil end", ""),
        ("""'"worker":%s,"session":%s,"seat":%s'""", """'"x":%s,"session":%s,"seat":%s'"""),
        (HELD, ""),
    ],
    "lease": [
        ('and_news == "0" or', ""),
        ("or base ~= token", ""),
        ('or redis.call("EXISTS", news_key) == 0', ""),
        ('if status ~= "running" then return {status, current, 0} end', ""),
        ('redis.call("HGET", sessions_key, worker) ~= session', "false"),
        ("if current ~= token and (", "if false and ("),
        ('redis.call("HEXISTS", banned_key, worker) == 1 and "banned" or "fenced"', '"fenced"'),
        ('if closed or redis.call("HLEN", received_key) >= needed then', "if closed then"),
        ("if closed or redis.call", "if redis.call"),
        ("if sharers > 0 then", "if false then"),
        ("if machine_of(cjson.decode(entry).worker) == machine_of(worker) then room = room - 1 end", ""),
        ("if machine_of(cjson.decode(entry).worker) == machine_of(worker) then", "if true then"),
        ("machine_of(cjson.decode(entry).worker) == machine_of(worker)", "cjson.decode(entry).worker == worker"),
        ("if machine_of(holder) == machine_of(worker) then room", "if holder == worker then room"),
        ("if machine_of(holder) == machine_of(worker) then room", "if true then room"),
        ("room = math.ceil(needed / sharers)", "room = math.ceil(total / sharers)"),
        ("(sharers > 0 and machines_of(workers) or #workers) < fewest", "#workers < fewest"),
        ("(sharers > 0 and machines_of(workers) or #workers) < fewest", "machines_of(workers) < fewest"),
        ('peers == "1" or singles == "1" then', 'peers == "1" then'),
        ('singles ~= "1" and speed', "speed"),
        ("elseif cursor < count then", "elseif true then"),
        ("if not measured and unmeasured > 0 then", "if false then"),
        ("if not measured and unmeasured > 0 then", "if unmeasured > 0 then"),
        ("> 1 and sharers == 0, {}", "> 1, {}"),
        ("> 1 and sharers == 0, {}", "> 0 and sharers == 0, {}"),
        ("machines_of(workers) > 1 and sharers == 0, {}", "#workers > 1 and sharers == 0, {}"),
        ("if is_suspect(freed) or is_others(freed) then", "if is_others(freed) then"),
        ("if is_suspect(freed) or is_others(freed) then", "if is_suspect(freed) then"),
        ("if decides(worker) then return false end", ""),
        ("if decides(other) then return true end", ""),
        ("if decides(other) then return true end", "if true then return true end"),
        ("return not known[machine_of(one)] and", "return"),
        ('and redis.call("HGET", kinds_key, one) == kind end', "end"),
        ("audit > 0 and #granted > 0 and find_copy()", "#granted > 0 and find_copy()"),
        ("audit > 0 and #granted > 0 and find_copy()", "audit > 0 and find_copy()"),
        ("if own[unit] or redis.call", "if redis.call"),
        ('or redis.call("HEXISTS", copies_key, unit) == 1 then', "then"),
        ("if holder and machine_of(holder) == machine_of(worker) then return false end", ""),
        ('if holder and redis.call("HGET", kinds_key, holder) ~= kind then return false end', ""),
        (':match("^.-|(.-)|")) <= now', ':match("^.-|(.-)|")) <= math.huge'),
        ("if is_audited(leases[1][i]) and suits", "if suits"),
        ("if is_audited(unit) and suits(unit, cjson", "if suits(unit, cjson"),
        ("if is_audited(unit) and suits(unit) then", "if suits(unit) then"),
        ("secret .. current", "current"),
        ('redis.call("HSET", audits_key, copy, lease)', ""),
        ('others and redis.call("HGET", suspects_key, freed)', 'redis.call("HGET", suspects_key, freed)'),
        ("if machine_of(suspect) ~= machine_of(worker) then return false end", ""),
        ("machine_of(suspect) ~= machine_of(worker)", "suspect ~= worker"),
        ("< fewest then", "< 0 then"),
        ("if tonumber(expires) > now then local one", "if true then local one"),
        ("room = room - one[1]", ""),
        ("return math.abs(late(holder))", "return -late(holder)"),
        ("known > 0 and usual / known or UNMEASURED_MS", "UNMEASURED_MS"),
        ("measured and math.max(devices, math.floor(TOGETHER_MS / speed)) or math.huge", "math.huge"),
        ('peers == "1" or singles == "1" then', 'singles == "1" then'),
        ("and speed >= SHORT_MS and needed == total", "and needed == total"),
        ("and speed >= SHORT_MS and needed == total", "and speed >= SHORT_MS"),
        ('and redis.call("EXISTS", suspects_key) == 0 then', "then"),
        ('and sharers == 0 and redis.call("EXISTS"', 'and redis.call("EXISTS"'),
        ("and now - math.max(opened, done) < math.max(EXPECTED_MS, each) then", "then"),
        ("math.max(opened, done)", "opened"),
        ("math.max(opened, done)", "done"),
        ("if ended > peer[1] then", "if true then"),
        ("/ peer[2] - 1e-9) - 1", "/ peer[2] - 1e-9)"),
        ("if idle > TRIED_AGAIN_AFTER * speed then share = 1 end", ""),
        ("elseif #granted < fair then", "elseif true then"),
        ("if other ~= session and redis.call", "if redis.call"),
        ('and redis.call("HEXISTS", backups_key, leases[1][i]) == 0 then', "then"),
        ("if cost < remaining(holder) and", "if"),
        ("and (from or holder) == holder", ""),
        ("and #granted < room then", "then"),
        ("BACKUP_FACTOR * held[holder][1] * speed", "BACKUP_FACTOR * speed"),
        ("* speed + BACKUP_MS", "* speed"),
        ('if #granted == 0 and backup == "1" then', "if #granted == 0 then"),
        ("from, target = holder, backups_key", "from = holder"),
        ("if from then redis.call", "if false then redis.call"),
        ("math.ceil(needed / #workers)", "math.ceil(total / #workers)"),
    ],
    "leave": [
        ("{leases_key, backups_key, audits_key}", "{leases_key, backups_key}"),
        ("if not fields_of(event) then", "if false then"),
        ("data.worker, data.session, data.freed = worker, newest, nil", "data.session = newest"),
        ('or (session ~= "*" and session ~= newest)', ""),
        ('if redis.call("EXISTS", round_key) == 1 then', "if true then"),
        (HELD, ""),
        ('redis.call("HDEL", peers_key, worker)', ""),
    ],
    "log": [
        ("if #line <= LONGEST_LINE then", "if true then"),
        ('if redis.call("EXISTS", spec_key) == 0 then return 0 end', ""),
        ('"MAXLEN", "~", kept,', ""),
        ("> kept_bytes do", "> kept_bytes and false do"),
        ('math.floor(redis.call("XLEN", logs_key) * 3 / 4)', "0"),
    ],
    "open": [
        ('redis.call("EXISTS", round_key) == 1 or', ""),
        ('or redis.call("EXISTS", spec_key) == 0', ""),
        ('if redis.call("GET", fence_key) ~= fence then return 0 end', ""),
        ('for micro_batch in carried:gmatch("%d+") do redis.call("RPUSH", free_key, micro_batch) end', ""),
        ('for i, name in ipairs(term_names) do redis.call("HSET", round_key, name, term_values[i]) end', ""),
        ('total == "0" and "finished" or "running"', '"running"'),
        ('total == "0" and "finished" or "running"', 'count == "0" and "finished" or "running"'),
        ('redis.call("DEL", recent_key, chain_key)', ""),
        ('redis.call("LPUSH", recent_key, token)', ""),
        ('redis.call("RPUSH", chain_key, token)', ""),
        (PERSISTED, ""),
    ],
    "pardon": [
        ('if redis.call("EXISTS", spec_key) == 0 then return 0 end', ""),
        ("if machine_of(banned) == machine_of(worker) then", "if true then"),
        ("if machine_of(banned) == machine_of(worker) then", "if banned == worker then"),
        ('redis.call("HDEL", strikes_key, banned)', ""),
        ("if lifted == 0 then return 0 end", ""),
    ],
    "pause": [
        ('if redis.call("HGET", round_key, "status") ~= "running" then return 0 end', ""),
    ],
    "refuse": [
        ('redis.call("HDEL", peers_key, worker)', ""),
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ("strikes >= banning_strikes and", ""),
        ('redis.call("HDEL", sessions_key, worker)', ""),
        ("or cjson.decode(entry).nonce ~= nonce", ""),
        ('redis.call("RPUSH", free_key, held[i])', ""),
        ('redis.call("HDEL", round_key, "closed")', ""),
        ('fault ~= "lost" and', ""),
        ("and there > 1 and machines == 1", "and machines == 1"),
        ("and there > 1 and machines == 1", "and there > 1"),
        ('machines_of(redis.call("HKEYS", sessions_key))', '#redis.call("HKEYS", sessions_key)'),
        ("if machines > 1 and of.strikes > 0 then", "if false then"),
        ("if machines > 1 and of.strikes > 0 then", "if of.strikes > 0 then"),
        ("machines = machines_of(agreeing)", "machines = #agreeing"),
        ("machines_of(senders), there", "#senders, there"),
        ('and answer ~= "refused"', ""),
        ('redis.call("HSET", answers_key, nonce_sha1, place .. "|refused")', ""),
        ('redis.call("UNLINK", update_key)', ""),
    ],
    "submit": [
        ('known .. "}"', '"" .. "}"'),
        ("""'"worker":%s,"session":%s,"nonce":%s,"base":%s'""", """'"x":%s,"session":%s,"nonce":%s,"base":%s'"""),
        ("if not said then return", "said = said or '' if false then return"),
        ("if #nonce > LONGEST_NAME then", "if false then"),
        ("if #event > LONGEST_EVENT then return nil end", ""),
        (
            "if limit == 0 or bytes <= limit then keep_staged(staged_keys[i], update_keys[i]) end",
            "keep_staged(staged_keys[i], update_keys[i])",
        ),
        (
            "bytes <= limit then keep_staged(staged_keys[i], update_keys[i]) end",
            "bytes < limit then keep_staged(staged_keys[i], update_keys[i]) end",
        ),
        ("if seen[micro_batch] then return", "if false then return"),
        ("if is_copy and bytes then", "if is_copy then"),
        ("most > 0 and parts > most or", ""),
        ("most > 0 and parts > most or", "parts > most or"),
        ("parts > most or", "parts >= most or"),
        ('(redis.call("HGET", audits_key, micro_batch) or ""):match("^[^|]*") == session', "true"),
        ('redis.call("HDEL", audits_key, micro_batches[i])', ""),
        ('if #copies > 0 then return answer("accepted") end', ""),
        ('keep_staged(staged_keys[i], update_keys[i] .. ":copy")', "keep_staged(staged_keys[i], update_keys[i])"),
        (
            'if limit == 0 or bytes <= limit then keep_staged(staged_keys[i], update_keys[i] .. ":copy")',
            'if true then keep_staged(staged_keys[i], update_keys[i] .. ":copy")',
        ),
        ("closed and 0 or total", "total"),
        ("if sharers > 0 then", "if false then"),
        ("if machine_of(cjson.decode(entry).worker) == machine_of(worker) then room = room - 1 end", ""),
        ("machine_of(cjson.decode(entry).worker) == machine_of(worker)", "cjson.decode(entry).worker == worker"),
        ("math.min(room, math.ceil(needed / sharers))", "math.min(room, math.ceil(total / sharers))"),
        ("elseif lease and #accepted < room then", "elseif lease then"),
        ("tonumber(losses[i]) or 0 / 0", "losses[i]"),
        ('loss ~= loss and "NaN" or', ""),
        ('"%.17g"', '"%.6g"'),
        ('if redis.call("HEXISTS", answers_key, nonce_sha1) == 1 then return answer("duplicate") end', ""),
        ('redis.call("HGET", sessions_key, worker) ~= session', "false"),
        ('if status ~= "running" or not behind then', 'if status ~= "running" then'),
        ('if status ~= "running" or not behind then', "if not behind then"),
        ('if lease and lease:match("^[^|]*") == session then return', "if lease then return"),
        ('if lease then redis.call("HDEL", key, micro_batches[i]) end', ""),
        ("for i = 1, #micro_batches do hand_back(i) end", ""),
        ("late[#late + 1] = micro_batch hand_back(i)", "late[#late + 1] = micro_batch"),
        ("behind + math.floor((waiting + #accepted) / needed)", "behind"),
        ("behind + math.floor((waiting + #accepted) / needed)", "math.floor((waiting + #accepted) / needed)"),
        ("waiting + #accepted", "waiting"),
        ('if #late > 0 then return answer("stale") end', ""),
        ("if lease and key == leases_key then", "if lease then"),
        ("if lease and key == leases_key then", "if false then"),
        ('elseif redis.call("HEXISTS", received_key, micro_batch) == 1 then', "elseif false then"),
        ('redis.call("LREM", free_key, 0, micro_batch)', ""),
        ('known and known:match("|(.*)$") or ""', '""'),
        ("if not known then remember(outcome) end", "remember(outcome)"),
        ('if redis.call("HLEN", answers_key) <= 2 * ANSWERS then return end', "if true then return end"),
        ("<= place - ANSWERS then", "<= place then"),
        ("<= place - ANSWERS then", "> place - ANSWERS then"),
        ("local nonce_sha1 = redis.sha1hex(nonce)", "local nonce_sha1 = nonce"),
        ("elseif lease and not bytes then", "elseif false then"),
        ("if length == 0 then return nil end", ""),
        ('or redis.call("HLEN", message) ~= parts then', "then"),
        ('if redis.call("HLEN", received_key) >= needed then', "if true then"),
        ('if redis.call("HLEN", received_key) >= needed then', 'if redis.call("HLEN", received_key) >= total then'),
        ("expired = expired + 1 hand_back(i)", "expired = expired + 1"),
        ("ipairs({leases_key, backups_key}) do local lease", "ipairs({leases_key}) do local lease"),
        ('redis.call("HDEL", key, micro_batch)', ""),
        ("ipairs({leases_key, backups_key}) do local holder", "ipairs({leases_key}) do local holder"),
        ("ipairs({leases_key, backups_key}) do local holder", "ipairs({backups_key}) do local holder"),
        ("if holder and holder ~= session then", "if holder then"),
        ("if known and at_least then each = math.max(each, known) end", ""),
        ("(each > known and 0.2 or 0.5)", "0.2"),
        ("(each > known and 0.2 or 0.5)", "0.5"),
        ('if peers == "1" and', "if"),
        ('redis.call("EXPIRE", peer_key, PEER_S)', ""),
        ("units + #accepted, loss", "units, loss"),
        ("measure(holder, (now - since) / units, true)", ""),
        ("(now - since) / units, true", "now - since, true"),
        (PERSISTED, ""),
    ],
    "renew": [
        ('if redis.call("GET", claim_key) ~= holder then return 0 end', ""),
    ],
    "republish": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        ('redis.call("UNLINK", news_key)', ""),
        ('if is_snapshot == "1" then', "if true then"),
        ('if is_snapshot == "1" then', "if false then"),
        ('redis.call("HDEL", round_key, "doubted")', ""),
        ('wake(versions_key, "token", token)', ""),
        (PERSISTED, ""),
    ],
    "resume": [
        ('if redis.call("HGET", round_key, "status") ~= "paused" then return 0 end', ""),
    ],
    "extend": [
        ('if not status then return "gone" end', ""),
        ('redis.call("HGET", sessions_key, worker) ~= session', "false"),
        ("if holder == session then", "if holder ~= '' then"),
        ("if tonumber(expires) < least and", "if"),
        ('and tonumber(since:match("^%d+")) > begun then', "then"),
        ("math.max(OLDEST_MS, OLDEST_UNITS * each)", "OLDEST_MS"),
        ("math.max(OLDEST_MS, OLDEST_UNITS * each)", "OLDEST_UNITS * each"),
        ('status == "running" and #micro_batches > 0', "#micro_batches > 0"),
        ("and #micro_batches > 0", ""),
        ("lost = false", ""),
        ("ipairs({leases_key, backups_key, audits_key}) do for", "ipairs({leases_key, audits_key}) do for"),
        ("ipairs({leases_key, backups_key, audits_key}) do for", "ipairs({leases_key, backups_key}) do for"),
        ('for _, key in ipairs(staged_keys) do redis.call("EXPIRE", key, staged_s) end', ""),
    ],
    "keep": [
        (VERSION_MOVED_ON, ""),
        (FENCE_MOVED_ON, ""),
        (PERSISTED, ""),
    ],
}
"""By script: what stands in it (or in the shared functions before it), what replaces that."""

MUTANTS = [(name, *change) for name, changes in CHANGES.items() for change in changes]


def mutate(name: str, old: str, new: str) -> tuple[str, str]:
    source = script(name).source
    found = lua.places(source, old)
    assert len(found) == 1, f"{name}.lua has {old!r} {len(found)} times: this mutant needs another text"
    [(start, end)] = found
    return name, source[:start] + new + source[end:]


def chosen() -> list[tuple[str, str, str]]:
    """The mutants that this run tries."""
    usual = len(MUTANTS) if sample.WHOLE or sample.newest_commit_changes("computeshare/protocol") else 12
    return sample.of(MUTANTS, int(os.environ.get("COMPUTESHARE_MUTANTS", usual)))


def test_a_mutant_is_found_however_its_script_is_laid_out() -> None:
    source = 'if a\n    and b ~= "x  y" -- why\nthen c() end'
    assert [source[slice(*place)] for place in lua.places(source, 'and b~="x  y"')] == ['and b ~= "x  y"']
    assert lua.places(source, 'and b ~= "x y"') == []


def test_each_mutants_text_stands_in_its_script_once() -> None:
    assert all(mutate(*mutant) for mutant in MUTANTS)


@pytest.mark.timeout(3600)
def test_a_check_taken_out_of_a_script_is_noticed_by_a_test() -> None:
    command, mutants = [sys.executable, "-m", "tests.support.mutation"], chosen()
    done = subprocess.run(
        command,
        cwd=sample.ROOT,
        input=json.dumps([mutate(*mutant) for mutant in mutants]),
        capture_output=True,
        text=True,
        timeout=300 + 10 * len(mutants),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unmutated, *codes = json.loads(done.stdout)
    assert unmutated == 0, f"the tests fail on the scripts as they are:\n{done.stderr}"
    odd = [mutant for mutant, code in zip(mutants, codes, strict=True) if code not in (0, 1)]
    assert not odd, f"no verdict on {odd}: {codes}"
    survivors = [mutant for mutant, code in zip(mutants, codes, strict=True) if code == 0]
    assert not survivors, "no test notices:\n" + "\n".join(map(str, survivors))
