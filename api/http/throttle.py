"""Token buckets by key: for failed tries to log in or to join by address, and for requests by token."""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

KEYS = 10_000
"""The most keys remembered: those used last."""


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

    def admits(self, key: str) -> bool:
        """Take a permit of this key, if there is one now; whether there was."""
        if self.wait_s(key):
            return False
        self.take(key)
        return True

    def _missing(self, key: str) -> float:
        missing, since = self._taken.get(key, (0.0, 0.0))
        return max(0.0, missing - (self._clock() - since) / self._refill_s)


def network_of(address: str) -> str:
    """The key of an address: the address itself; for IPv6 its /64 network, as a household has 2^64 addresses."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
