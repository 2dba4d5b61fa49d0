"""Reads clock, power and sleep of this machine, and keeps the decision whether the worker rests."""

import sys
import time
from collections.abc import Callable
from datetime import datetime

import psutil
import structlog

from computeshare.host import linux_power
from computeshare.host.rest_policy import Manners, Power, RestDecision, may_work

LONG_SLEEP_S = 10.0
"""After a longer sleep the leases have expired, and the connections may be broken."""
log = structlog.get_logger()


def read_power() -> Power:
    """This machine's power, as the system reports it; all fields are None without a battery."""
    try:
        if sys.platform == "linux":
            return linux_power.read(linux_power.FOLDER)
        found = psutil.sensors_battery()
    except (AttributeError, OSError, TypeError, ValueError):  # no such call there, or nothing that can be read
        return Power()
    return Power(found.power_plugged, min(100.0, max(0.0, float(found.percent)))) if found else Power()


class Minder:
    """Decides whether this machine's worker is to rest; the caller calls `look` every few seconds."""

    def __init__(
        self,
        manners: Manners | None = None,
        read: Callable[[], Power] = read_power,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.manners, self._read, self._now = manners or Manners(), read, now
        self.power = Power()
        self.asleep = False
        """The machine is about to sleep, or has not said that it is awake again."""
        self._decision = RestDecision(True)

    @property
    def resting(self) -> str:
        """Why the worker rests; empty while it works."""
        return "its machine sleeps" if self.asleep else self._decision.reason

    def look(self) -> None:
        """Read the power and decide again."""
        before = self._decision
        self.power = self._read()
        self._decision = may_work(self.manners, self.power, self._now(), before)
        if self._decision.reason and self._decision.reason != before.reason:
            log.info("resting", reason=self._decision.reason)
        elif self._decision.work and not before.work:
            log.info("working again")


class Naps:
    """Measures how long the machine has slept, by two clocks in seconds: only `always` runs on during sleep."""

    def __init__(self, always: Callable[[], float] | None = None, awake: Callable[[], float] = time.monotonic) -> None:
        self._always, self._awake = always or _clock_through_sleep(), awake
        self._difference = self._always() - self._awake()

    def slept_s(self) -> float:
        """Seconds slept since the last call."""
        before, self._difference = self._difference, self._always() - self._awake()
        return max(0.0, self._difference - before)


def _clock_through_sleep() -> Callable[[], float]:
    """A clock that runs on during sleep, unlike `time.monotonic`, and that is not set where the system has such."""
    clock = time.CLOCK_MONOTONIC if sys.platform == "darwin" else getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME)
    return lambda: time.clock_gettime(clock)
