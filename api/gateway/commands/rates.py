"""How often a machine may call scripts: what leaves a row for good seldom, and all of them so many times per second."""

import asyncio
from collections.abc import Mapping

import structlog

from api.http.throttle import Throttle
from computeshare.runtime.log_lines import Seldom
from computeshare.transport.refusals import for_now

SELDOM: Mapping[str, tuple[int, float]] = {"announce": (30, 2.0), "join": (60, 1.0)}
"""By script: the calls that a machine may make in a row; seconds until it may make a further one."""
CALLS, CALL_S = 20_000, 0.0002
"""The same for the calls of all scripts together. An honest worker makes about five in a round."""
LOGGED_EVERY_S = 60.0
log = structlog.get_logger()


class Rates:
    """Rates of all machines at one gateway."""

    def __init__(self, calls: int = CALLS, call_s: float = CALL_S) -> None:
        self._calls = Throttle(calls, call_s)
        self._seldom = {name: Throttle(most, again_s) for name, (most, again_s) in SELDOM.items()}
        self._logged = Seldom(LOGGED_EVERY_S)

    def refusal(self, machine: str, script: str) -> str | None:
        """Why a machine may not call a script now; None: it may, which counts the call."""
        if (throttle := self._seldom.get(script)) is None:
            return None
        if wait_s := throttle.wait_s(machine):
            return for_now(f"this machine calls {script} too often", wait_s)
        throttle.take(machine)
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
