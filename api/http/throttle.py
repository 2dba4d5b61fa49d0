"""Limits the failed tries to log in or to join, per client address."""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

TRIES = 10
"""The most failed tries of an address in a row, before it must wait."""
REFILL_S = 3.0
"""Seconds until an address may make a further try."""
ADDRESSES = 10_000
"""The most addresses remembered: the addresses that failed last."""


class Throttle:
    """A token bucket of tries for each address; only failed tries take a token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tries missing, as of when

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0: now."""
        with self._lock:
            return max(0.0, (self._missing(_network(address)) - (TRIES - 1)) * REFILL_S)

    def failed(self, address: str) -> None:
        """Count a failed try of this address."""
        network = _network(address)
        with self._lock:
            self._failed[network] = (min(float(TRIES), self._missing(network) + 1), self._clock())
            self._failed.move_to_end(network)
            if len(self._failed) > ADDRESSES:
                self._failed.popitem(last=False)

    def _missing(self, network: str) -> float:
        missing, since = self._failed.get(network, (0.0, 0.0))
        return max(0.0, missing - (self._clock() - since) / REFILL_S)


def _network(address: str) -> str:
    """The key of an address: the address itself; for IPv6 its /64 network, as a household has 2^64 addresses."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
