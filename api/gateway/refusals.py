"""Counts and logs the commands that a gateway refuses, and cuts off machines that go on sending such."""

from collections import Counter

import structlog

from api.gateway.commands.filter import TooManyRefused
from api.http.throttle import Throttle
from computeshare.runtime.log_lines import Seldom
from computeshare.transport.refusals import is_for_now

MOST_REFUSED, REFUSED_S = 100, 0.6
"""Commands of one machine that may be refused in a row; seconds until one more may be."""
LOGGED_EVERY_S = 1.0
log = structlog.get_logger()


class Refusals:
    """Counts and logs what was refused, by machine, for all connections of a gateway."""

    def __init__(self, most: int = MOST_REFUSED, again_s: float = REFUSED_S) -> None:
        self.counts: Counter[str] = Counter()
        self._seldom = Seldom(LOGGED_EVERY_S)
        self._throttle = Throttle(most, again_s)

    def note(self, machine: str, name: str, reason: str) -> None:
        """Note that a command of a machine was refused; for now, as honest ones are, too, or for good. Raises
        TooManyRefused: it sent too many of the latter.
        """
        self.counts[machine] += 1
        event = "refused what a machine sent"
        self._seldom.tell(log.warning, event, machine, machine=machine, name=name, reason=reason)
        if not is_for_now(reason) and not self._throttle.admits(machine):
            raise TooManyRefused("this machine sent too many commands that it may not send")
