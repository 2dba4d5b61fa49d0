"""Every check in the scripts is needed, and some test says so: each mutant has one check taken out or altered."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

MUTANTS: list[tuple[str, str, str]] = [
    ("announce", 'if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end', ""),
    ("announce", 'redis.call("GET", KEYS[2]) ~= ARGV[1]', "false"),
    ("claim", 'redis.call("EXISTS", KEYS[1]) == 0 or ', ""),
    ("claim", ' or redis.call("EXISTS", KEYS[2]) == 1', ""),
    (
        "claim",
        'math.max((tonumber(redis.call("GET", KEYS[3])) or 0) + 1, now[1] * 1000000 + now[2])',
        'tonumber(redis.call("GET", KEYS[3]) or now[1])',
    ),
    (
        "claim",
        'math.max((tonumber(redis.call("GET", KEYS[3])) or 0) + 1, now[1] * 1000000 + now[2])',
        '(tonumber(redis.call("GET", KEYS[3])) or 0) + 1',
    ),
    ("commit", 'redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or ', ""),
    ("commit", ' or redis.call("GET", KEYS[2]) ~= ARGV[3]', ""),
    ("commit", 'if status ~= "running" and status ~= "paused" then return 0 end', ""),
    ("commit", 'redis.call("PERSIST", KEYS[4])', ""),
    ("commit", '"cursor", "0", ', ""),
    ("commit", 'if ARGV[6] == "0" then', "if false then"),
    ("commit", 'redis.call("DEL", KEYS[6], ', 'redis.call("DEL", '),
    ("commit", "KEYS[7], KEYS[8], KEYS[9], ", "KEYS[8], KEYS[9], "),
    ("commit", "KEYS[8], KEYS[9], ", "KEYS[9], "),
    ("commit", "KEYS[9], KEYS[10], ", "KEYS[10], "),
    ("commit", "KEYS[10], KEYS[13]", "KEYS[13]"),
    ("commit", 'if redis.call("HLEN", KEYS[8]) ~= #counted then return 0 end', ""),
    ("commit", "redis.sha1hex(table.concat(entries)) ~= ARGV[9] or ", ""),
    ("commit", ' or redis.call("EXISTS", KEYS[15]) == 0', ""),
    ("commit", "if #arrivals < 8 then return 0 end", "if #arrivals < 4 then return 0 end"),
    ("commit", "4 * math.max(median(arrivals), 0.1 * middle, 5)", "4 * math.max(median(arrivals), 0.2 * middle, 5)"),
    ("commit", 'redis.call("HDEL", KEYS[1], "closed")', ""),
    ("commit", 'for micro_batch in ARGV[10]:gmatch("%d+") do redis.call("RPUSH", KEYS[9], micro_batch) end', ""),
    ("commit", '"carried", ARGV[10], "total", ARGV[11]', '"carried", ARGV[10], "total", ARGV[6]'),
    ("close", "round[1] ~= ARGV[1] or ", ""),
    ("close", ' or redis.call("GET", KEYS[2]) ~= ARGV[2]', ""),
    ("close", 'if round[2] ~= "running" or round[3]', "if round[3]"),
    ("close", 'if round[2] ~= "running" or round[3]', 'if round[2] ~= "running"'),
    ("close", "if received < tonumber(ARGV[3]) then return 0 end", ""),
    ("discard", 'redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or ', ""),
    ("discard", ' or redis.call("GET", KEYS[2]) ~= ARGV[2]', ""),
    ("discard", 'for i = 3, #KEYS do redis.call("UNLINK", KEYS[i]) end', ""),
    ("finish", 'if redis.call("EXISTS", KEYS[1]) == 0 then return 0 end', ""),
    ("join", "if seat and seat ~= ARGV[3]", "if false"),
    ("join", 'if status ~= "running" then return {status, last} end', ""),
    ("join", "if former then", "if false then"),
    ("join", ':match("^[^|]*") == former', ""),
    ("join", 'if redis.call("HEXISTS", KEYS[9], ARGV[1]) == 1 then return {"banned", last} end', ""),
    ("join", "if #freed > 0 then", "if true then"),
    ("join", 'redis.call("XADD", KEYS[7], "MAXLEN", "16", "*", "freed", #freed)', ""),
    ("keep", 'redis.call("GET", KEYS[1]) ~= ARGV[1] or ', ""),
    ("keep", ' or redis.call("HGET", KEYS[2], "token") ~= ARGV[2]', ""),
    ("keep", 'redis.call("PERSIST", KEYS[4])', ""),
    ("lease", 'if status ~= "running" then return {status, token, 0} end', ""),
    ("lease", 'redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3]', "false"),
    ("lease", "if token ~= ARGV[1] then", "if false then"),
    ("lease", 'if redis.call("HLEN", KEYS[2]) < tonumber(ARGV[8]) then', "if false then"),
    ("lease", 'redis.call("HEXISTS", KEYS[9], ARGV[2]) == 1 and "banned" or "fenced"', '"fenced"'),
    ("lease", 'if round[9] then return {"wait", token, 1000} end', ""),
    ("lease", 'if ARGV[7] ~= "0" then', "if false then"),
    ("lease", "if cjson.decode(entry).worker == ARGV[2] then room = room - 1 end", ""),
    ("lease", "if cjson.decode(entry).worker == ARGV[2] then", "if true then"),
    ("lease", "worker == ARGV[2] and tonumber(expires) > now then", "worker == ARGV[2] then"),
    ("lease", "worker == ARGV[2] and tonumber(expires) > now then", "tonumber(expires) > now then"),
    ("lease", "worker == ARGV[2] and tonumber(expires) > now then", "false then"),
    ("lease", 'if redis.call("HEXISTS", KEYS[5], freed) == 0 then', "if true then"),
    ("lease", "elseif cursor < count then", "elseif true then"),
    ("lease", "(expires <= now or ", "(true or "),
    ("lease", "(expires <= now or ", "(false or "),
    ("lease", 'ARGV[4] == "1" and session ~= ARGV[3] and slow <= now', "session ~= ARGV[3] and slow <= now"),
    ("lease", "session ~= ARGV[3] and slow <= now", "slow <= now"),
    ("lease", "and slow <= now", ""),
    ("lease", '      and redis.call("HEXISTS", KEYS[4], held[i]) == 0))', "))"),
    ("lease", "backups[micro_batch] and KEYS[4] or KEYS[3]", "KEYS[3]"),
    ("leave", ' or (ARGV[2] ~= "*" and ARGV[2] ~= session)', ""),
    ("leave", ':match("^[^|]*") == session', ""),
    ("leave", 'if redis.call("EXISTS", KEYS[1]) == 1 then', "if true then"),
    ("open", 'redis.call("EXISTS", KEYS[1]) == 1 or ', ""),
    ("open", ' or redis.call("EXISTS", KEYS[9]) == 0', ""),
    ("open", 'if redis.call("GET", KEYS[2]) ~= ARGV[1] then return 0 end', ""),
    ("open", 'redis.call("PERSIST", KEYS[4])', ""),
    ("open", 'redis.call("PERSIST", KEYS[6])', ""),
    ("open", 'for micro_batch in ARGV[7]:gmatch("%d+") do redis.call("RPUSH", KEYS[10], micro_batch) end', ""),
    ("pardon", 'redis.call("EXISTS", KEYS[1]) == 0 or ', ""),
    ("pardon", ' or redis.call("HDEL", KEYS[2], ARGV[1]) == 0', ""),
    ("pardon", 'redis.call("HDEL", KEYS[3], ARGV[1])', ""),
    ("pause", 'if redis.call("HGET", KEYS[1], "status") ~= "running" then return 0 end', ""),
    ("refuse", "strikes >= tonumber(ARGV[8]) and ", ""),
    ("refuse", 'redis.call("HDEL", KEYS[11], ARGV[4])', ""),
    ("refuse", 'redis.call("HGET", KEYS[1], "token") ~= ARGV[1] or ', ""),
    ("refuse", ' or redis.call("GET", KEYS[2]) ~= ARGV[2]', ""),
    ("refuse", " or cjson.decode(entry).nonce ~= ARGV[10]", ""),
    ("refuse", 'redis.call("LREM", KEYS[4], 0, micro_batch)', ""),
    ("refuse", "if i == 12 then free(held[j]) end", ""),
    ("refuse", 'redis.call("HDEL", KEYS[1], "closed")', ""),
    ("refuse", 'ARGV[7] ~= "lost" and ', ""),
    ("refuse", " and there > 1 and sessions == 1", " and sessions == 1"),
    ("refuse", " and there > 1 and sessions == 1", " and there > 1"),
    ("refuse", "if sessions > 1 and one.strikes > 0 then", "if false then"),
    ("refuse", "if sessions > 1 and one.strikes > 0 then", "if one.strikes > 0 then"),
    ("lease", ' > 1 and ARGV[7] == "0", {}', " > 1, {}"),
    ("lease", ' > 1 and ARGV[7] == "0", {}', ' > 0 and ARGV[7] == "0", {}'),
    ("lease", "if suspects and suspects[ARGV[3]] and not next(suspects, next(suspects)) then", "if false then"),
    ("lease", "if suspects and suspects[ARGV[3]] and not", "if suspects and not"),
    ("lease", " and not next(suspects, next(suspects)) then", " then"),
    ("refuse", ' and redis.call("GET", KEYS[14]) ~= "refused"', ""),
    ("refuse", 'redis.call("SET", KEYS[14], "refused", "EX", ARGV[11])', ""),
    ("refuse", 'redis.call("SET", KEYS[14], "refused", "EX", ARGV[11])', 'redis.call("SET", KEYS[14], "refused")'),
    ("submit", "named[micro_batch] or ", ""),
    ("submit", "round[7] and 0 or total --", "total --"),
    ("submit", 'if ARGV[7] ~= "0" then', "if false then"),
    ("submit", "if cjson.decode(entry).worker == ARGV[2] then room = room - 1 end", ""),
    ("submit", "elseif mine and #accepted < room then", "elseif mine then"),
    ("submit", "tonumber(ARGV[9 + 2 * i]) or 0 / 0", "ARGV[9 + 2 * i]"),
    ("submit", 'loss ~= loss and "NaN" or ', ""),
    ("submit", "%.17g", "%.6g"),
    ("open", 'ARGV[5] == "0" and "finished" or "running"', '"running"'),
    ("refuse", 'redis.call("UNLINK", KEYS[5])', ""),
    ("renew", 'if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end', ""),
    ("resume", 'if redis.call("HGET", KEYS[1], "status") ~= "paused" then return 0 end', ""),
    ("submit", 'if redis.call("EXISTS", KEYS[7]) == 1 then return answer("duplicate") end', ""),
    ("submit", 'redis.call("HGET", KEYS[2], ARGV[2]) ~= ARGV[3]', "false"),
    ("submit", 'if token ~= ARGV[1] or status ~= "running"', 'if status ~= "running"'),
    ("submit", 'if token ~= ARGV[1] or status ~= "running"', "if token ~= ARGV[1]"),
    ("submit", '(lease and lease:match("^[^|]*") == ARGV[3] and lease)', "lease"),
    ("submit", '(backup and backup:match("^[^|]*") == ARGV[3] and backup)', "backup"),
    ("submit", ' or redis.call("HEXISTS", KEYS[5], micro_batch) == 1 then', " then"),
    ("submit", 'elseif mine and redis.call("EXISTS", KEYS[12 + 2 * i]) == 0 then', "elseif false then"),
    ("submit", 'redis.call("PERSIST", KEYS[13 + 2 * i])', ""),
    ("submit", 'redis.call("HDEL", KEYS[3], micro_batch)', ""),
    ("submit", 'redis.call("HDEL", KEYS[4], micro_batch)', ""),
    ("submit", 'if redis.call("HLEN", KEYS[5]) == total then', "if true then"),
]
"""Script, the text as it stands, what replaces it."""

ROOT = Path(__file__).resolve().parents[2]


def mutate(script: str, old: str, new: str) -> tuple[str, str]:
    source = resources.files("computeshare.lua").joinpath(f"{script}.lua").read_text()
    assert source.count(old) == 1, f"{script}.lua has {old!r} {source.count(old)} times: this mutant needs another text"
    return script, source.replace(old, new)


@pytest.mark.timeout(600)
def test_a_check_taken_out_of_a_script_is_noticed_by_a_test() -> None:
    command = [sys.executable, "-m", "tests.integration.mutation"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=json.dumps([mutate(*mutant) for mutant in MUTANTS]),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unmutated, *codes = json.loads(done.stdout)
    assert unmutated == 0, "the tests fail on the scripts as they are"
    odd = [mutant for mutant, code in zip(MUTANTS, codes, strict=True) if code not in (0, 1)]
    assert not odd, f"no verdict on {odd}: {codes}"
    survivors = [mutant for mutant, code in zip(MUTANTS, codes, strict=True) if code == 0]
    assert not survivors, "no test notices:\n" + "\n".join(map(str, survivors))
