"""How often a machine may call scripts: what leaves a row for good seldom, and all of them so many times per second."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import structlog

from computeshare.runtime.log_lines import Seldom
from computeshare.transport.refusals import for_now

SELDOM: Mapping[str, tuple[int, float]] = {"announce": (30, 2.0), "join": (60, 1.0)}
"""By script: the calls that a machine may make in a row; seconds until it may make a further one."""
CALLS, CALL_S = 20_000, 0.0002
"""The same for the calls of all scripts together. An honest worker makes about five in a round."""
LOGGED_EVERY_S = 60.0
log = structlog.get_logger()


class Permits(Protocol):
    """Permits by key, of which each key gets further ones as time passes: `api.http.throttle.Throttle`."""

    def wait_s(self, key: str) -> float:
        """Seconds until there is a permit for this key; 0: now."""

    def take(self, key: str) -> None:
        """Take a permit of this key, if there is one."""


class CommandRates:
    """Rates of all machines at one gateway.

    Args:
        calls: permits of a machine to call scripts.
        seldom: the same by script, for those of `SELDOM`.
    """

    def __init__(self, calls: Permits, seldom: Mapping[str, Permits]) -> None:
        self._calls, self._seldom = calls, dict(seldom)
        self._logged = Seldom(LOGGED_EVERY_S)

    def refusal(self, machine: str, script: str) -> str | None:
        """Why a machine may not call a script now; None: it may, which counts the call."""
        if (permits := self._seldom.get(script)) is None:
            return None
        if wait_s := permits.wait_s(machine):
            return for_now(f"this machine calls {script} too often", wait_s)
        permits.take(machine)
        return None

    def has_room(self, machine: str) -> bool:
        """Whether a machine may call a script now, as far as the calls of all scripts are limited."""
        return not self._calls.wait_s(machine)

    async def room(self, machine: str) -> None:
        """Wait until a machine may call a script, and count the call."""
        while wait_s := self._calls.wait_s(machine):
            self._logged.tell(log.warning, "a machine calls scripts too fast", machine, machine=machine)
            await asyncio.sleep(wait_s)
        self._calls.take(machine)
