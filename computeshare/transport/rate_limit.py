"""A limit in bits per second: a token bucket that connections share."""

import math
import re
import threading
import time
from collections.abc import Callable

from computeshare.errors import SettingsError

SLOWEST = 64_000
"""The lowest limit allowed, in bits per second."""
_BURST_S = 0.02
_RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(|k|m|g)bit(?:/s|ps)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def parse_rate(text: str) -> float:
    """Bits per second from a text such as `5mbit`, `800kbit` or `1.5Mbit/s` (k is 1000).

    Raises: SettingsError: the text is no such rate, or the rate is too low to train over.
    """
    found = _RATE.fullmatch(text.strip())
    if not found:
        raise SettingsError(f"{text!r} is not a rate: give bits per second, for example 5mbit, 800kbit or 1.5Mbit/s")
    rate = float(found[1]) * _FACTORS[found[2].lower()]
    if rate < SLOWEST:
        raise SettingsError(f"{text} is too slow to train over: allow 64kbit or more")
    return rate


class Pacer:
    """Limits all its callers together, in any thread, to `bits_per_s`, plus 2 % in any one second (5 % at `SLOWEST`).

    Callers are served in the order of their calls; each gets the time of `clock` from which it may send. Allowance that
    is unused for 20 ms expires, so that silence saves up no burst.
    """

    def __init__(self, bits_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bits_per_s / 8
        self.clock = clock
        self._burst_bytes = max(400, int(self.bytes_per_s * _BURST_S))
        self._paid_until = -math.inf
        self._lock = threading.Lock()

    def reserve(self, wanted_bytes: int) -> tuple[int, float]:
        """How many of `wanted_bytes` may be sent together (at least 1), and the time of `clock` to send them."""
        granted = max(1, min(wanted_bytes, self._burst_bytes // 2))
        with self._lock:
            earliest = self.clock() - self._burst_bytes / self.bytes_per_s
            self._paid_until = max(self._paid_until, earliest) + granted / self.bytes_per_s
            return granted, self._paid_until
