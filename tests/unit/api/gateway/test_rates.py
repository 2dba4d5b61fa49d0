"""How often a machine may call scripts."""

import asyncio
from collections import Counter
from hashlib import sha1
from typing import Any

from api.gateway.commands import rates
from api.gateway.commands.filter import CommandFilter
from api.gateway.commands.rates import CommandRates
from api.gateway.commands.replies import AwaitedReplies, Unread
from api.http.throttle import Throttle
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import script
from tests.support.coroutines import asynchronously
from tests.unit.api.gateway.test_parser import framed
from tests.unit.api.gateway.test_replies import Everything, passes

MACHINE = "12345678"
JOB = JobKeys("mine")


def lease(machine: str = MACHINE) -> bytes:
    """The call with which a worker asks for a lease."""
    said = {"worker": f"{machine}work", "session": "a" * 32, "token": "", "and_news": 0, "devices": 1}
    inputs = script("lease").inputs(JOB, said)
    digest = sha1(script("lease").source.encode(), usedforsecurity=False).hexdigest()
    return framed(b"EVALSHA", digest.encode(), *(str(each).encode() for each in inputs))


def rated(calls: int = rates.CALLS, call_s: float = rates.CALL_S) -> CommandRates:
    return CommandRates(Throttle(calls, call_s), {name: Throttle(*limit) for name, limit in rates.SELDOM.items()})


def connection(limits: CommandRates, machine: str = MACHINE) -> CommandFilter:
    anything: Any = Everything()
    return CommandFilter(machine, anything, lambda _: None, AwaitedReplies(Unread()), Counter(), limits, anything)


def test_the_scripts_that_a_machine_calls_per_second_are_limited_over_all_its_connections() -> None:
    async def check() -> None:
        limits = rated(5, 1000)
        one, two = connection(limits), connection(limits)
        assert await passes(one, lease() * 3) == (lease() * 3, True)
        assert await passes(two, lease() * 3) == (lease() * 2, False)
        assert await passes(one, framed(b"PING")) == (framed(b"PING"), True), "other commands are not held up"
        other = connection(limits, "87654321")
        assert await passes(other, lease("87654321")) == (lease("87654321"), True)

    asynchronously(check())


def test_a_machine_that_is_too_fast_goes_on_at_its_rate() -> None:
    async def check() -> None:
        one, out = connection(rated(1, 0.001)), b""
        async with asyncio.timeout(10):
            async for pieces in one.passed(lease() * 50):
                out += b"".join(pieces)
        assert out == lease() * 50

    asynchronously(check())


def test_what_adds_to_the_timeline_is_called_seldom_by_a_machine_of_all_its_workers() -> None:
    limits = rated()
    for name, (most, _) in rates.SELDOM.items():
        assert [limits.refusal(MACHINE, name) for _ in range(most)] == [None] * most
        assert f"calls {name} too often: try again in" in str(limits.refusal(MACHINE, name))
        assert limits.refusal("87654321", name) is None
    assert limits.refusal(MACHINE, "submit") is None
