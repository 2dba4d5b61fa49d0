"""How often an address may try in vain to log in or to join."""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

TRIES = 10
"""That may fail at once."""
REFILL_S = 3.0
"""After which one more may."""
ADDRESSES = 10_000
"""That are remembered: those that failed last."""


class Throttle:
    """A bucket of tries for each address; only those that fail are taken out of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tries missing, as of when

    def wait_s(self, address: str) -> float:
        """How long until this address may try again; 0: now."""
        with self._lock:
            return max(0.0, (self._missing(_network(address)) - (TRIES - 1)) * REFILL_S)

    def failed(self, address: str) -> None:
        """One try was in vain."""
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
    """The address itself; of IPv6, where one household has 2^64 of them, the first half."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
