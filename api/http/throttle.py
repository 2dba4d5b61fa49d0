"""Token buckets by key: for failed tries to log in or to join by address, and for requests by token."""

import asyncio
import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

KEYS = 10_000
"""The most keys remembered: those used last."""
LOOK_S = 0.01
"""Seconds between two looks of a try that waits for those before it."""
PATIENCE_S = 1.0
"""For how long, in seconds, a try waits for those before it."""


class Throttle:
    """A bucket of `size` permits for each key, which fills up again by one in `refill_s` seconds."""

    def __init__(self, size: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._refill_s, self._clock = size, refill_s, clock
        self._lock = threading.Lock()
        self._taken: OrderedDict[str, tuple[float, float]] = OrderedDict()  # permits missing, as of when

    def wait_s(self, key: str) -> float:
        """Seconds until there is a permit for this key; 0: now."""
        with self._lock:
            return max(0.0, (self._missing(key) - (self._size - 1)) * self._refill_s)

    def take(self, key: str) -> None:
        """Take a permit of this key, if there is one."""
        with self._lock:
            self._taken[key] = (min(float(self._size), self._missing(key) + 1), self._clock())
            self._taken.move_to_end(key)
            if len(self._taken) > KEYS:
                self._taken.popitem(last=False)

    def give_back(self, key: str) -> None:
        """Return a permit of this key that was taken."""
        with self._lock:
            if missing := max(0.0, self._missing(key) - 1):
                self._taken[key] = (missing, self._clock())
            else:
                self._taken.pop(key, None)

    def admits(self, key: str) -> bool:
        """Take a permit of this key, if there is one now; whether there was."""
        if self.wait_s(key):
            return False
        self.take(key)
        return True

    def _missing(self, key: str) -> float:
        missing, since = self._taken.get(key, (0.0, 0.0))
        return max(0.0, missing - (self._clock() - since) / self._refill_s)


class Tries:
    """Tries by key: each takes a permit before anybody knows whether it is right, and a right one gives it back."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._open: Counter[str] = Counter()
        """Tries that are being answered, by key."""

    async def begin(self, key: str) -> float:
        """Take a permit; if there is none, wait a little for the tries that are being answered: some may be right.

        Returns 0, or the seconds until there is a permit: then nothing was taken.
        """
        until = time.monotonic() + PATIENCE_S
        while (wait_s := self._throttle.wait_s(key)) and self._open[key] and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if not wait_s:
            self._throttle.take(key)
            self._open[key] += 1
        return wait_s

    def end(self, key: str, is_right: bool) -> None:
        """Note the result of a try that took a permit."""
        self._open -= Counter((key,))
        if is_right:
            self._throttle.give_back(key)


def network_of(address: str) -> str:
    """The key of an address: the address itself; for IPv6 its /64 network, as a household has 2^64 addresses."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
