"""The table of permitted commands, and that of scripts."""

import pytest

from api.gateway.commands import policy, scripts
from api.gateway.commands.access import is_own
from api.gateway.commands.filter import needed
from api.gateway.commands.parser import Head
from api.gateway.commands.policy import CommandNeeds
from api.gateway.commands.scripts import ARGUMENTS, IMPLIED, NotPermitted
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import script

WORKER, JOB = "12345678work", JobKeys("mine")


def needs(*arguments: str, count: int = 0) -> CommandNeeds:
    return needed(Head(tuple(each.encode() for each in arguments), count or len(arguments)))


def test_what_a_command_presumes_follows_from_its_names() -> None:
    assert needs("PING") == CommandNeeds()
    assert needs("get", f"cs:orders:{WORKER}") == CommandNeeds(frozenset({WORKER}))
    assert needs("HGET", JOB.weights("1.0.0123456789abcdef"), "0") == CommandNeeds(jobs=frozenset({"mine"}))
    staged = JOB.staged(f"{WORKER}:{'0' * 32}:7")
    assert needs("HSET", f"cs:worker:{WORKER}", "name", "x" * 8192) == CommandNeeds(frozenset({WORKER}))
    assert needs("HSET", staged, count=6) == CommandNeeds(frozenset({WORKER}), frozenset({"mine"}))
    other = JOB.staged(f"87654321work:{'0' * 32}:7")
    assert needs("UNLINK", staged, other).workers == {WORKER, "87654321work"}
    wanted = needs("HSET", "cs:bundle-wants", f"{WORKER}-{'0' * 16}", f"1 sha256:{'5' * 64} !{'6' * 64}")
    readers = frozenset({f"{WORKER}-{'0' * 16}"})
    assert wanted == CommandNeeds(frozenset({WORKER}), digests=frozenset({"5" * 64}), readers=readers)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("HSET", JOB.staged(f"{WORKER}:{'0' * 32}:7")), 3),
        (("HSET", JOB.staged(f"{WORKER}:{'0' * 32}:7")), 5),
        (("SET", JOB.probe(WORKER)), 6),
        (("SET", JOB.probe(WORKER), "x", "EX", "60"), 5),
        (("GET", JOB.spec() + "\n"), 2),
        (("PING", "x"), 2),
        (("MULTI", "x"), 2),
        (("SUBSCRIBE",), 1),
        (("EXPIRE", "cs:bundle-wants", "0"), 3),
        (("CLIENT", "SETNAME", "x y"), 3),
        (("HMGET", JOB.weights("1.0.0123456789abcdef"), "0", "1", "0"), 5),
        (("HMGET", JOB.news("1.0.0123456789abcdef"), "0", "00"), 4),
        (("HSET", f"cs:worker:{WORKER}", "name", "x" * 8193), 4),
    ],
)
def test_other_forms_are_not_permitted(arguments: tuple[str, ...], count: int) -> None:
    with pytest.raises(NotPermitted):
        needs(*arguments, count=count)


def test_only_commands_with_large_values_are_decided_on_before_their_end() -> None:
    staged = JOB.staged(f"{WORKER}:{'0' * 32}:7").encode()
    assert policy.is_enough([b"HSET", staged]) and policy.is_enough([b"set", JOB.probe(WORKER).encode()])
    for early in ([b"HSET"], [b"HSET", staged, b"0"], [b"SET", JOB.measured(WORKER).encode()], [b"GET", staged], [b""]):
        assert not policy.is_enough(early)


def test_every_key_and_argument_of_every_script_of_workers_has_a_form() -> None:
    for name, forms in ARGUMENTS.items():
        found = script(name)
        assert {*found.arguments.single, *found.arguments.rows} == forms.keys(), name
        assert {*found.keys.single, *found.keys.rows} - {*found.of_job} <= IMPLIED.keys(), name
        for form in forms.values():
            scripts._form(form)


def test_every_line_of_the_table_is_a_rule() -> None:
    lines = [line for line in policy.PERMITTED.splitlines() if line.strip()]
    assert sum(map(len, policy.rules().values())) == len(lines) > 90
    assert "<" not in "".join(
        word.pattern.decode().replace("(?P<", "")
        for rules in policy.rules().values()
        for rule in rules
        for word in (*rule.words, *rule.tail)
    )


def test_a_worker_of_a_machine_has_its_id_and_more() -> None:
    assert is_own("12345678", WORKER) and is_own("12345678", "12345678" + "a" * 24)
    for wrong in ("12345678", "12345678abc", "12345678" + "a" * 25, "12345678wor-k", "12345679work", "x12345678work"):
        assert not is_own("12345678", wrong)
