"""Keeping to a number of bits per second: a token bucket that connections share."""

import math
import re
import threading
import time
from collections.abc import Callable

from computeshare.errors import SettingsError

SLOWEST = 64_000
"""Bits per second below which no limit may be set."""
_BURST_S = 0.02
_RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(|k|m|g)bit(?:/s|ps)?", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def parse_rate(text: str) -> float:
    """Bits per second from words such as `5mbit`, `800kbit` or `1.5Mbit/s` (a k is 1000).

    Raises: SettingsError: it is no such rate, or one too low to train over.
    """
    found = _RATE.fullmatch(text.strip())
    if not found:
        raise SettingsError(f"{text!r} is no rate: write bits per second, such as 5mbit, 800kbit or 1.5Mbit/s")
    rate = float(found[1]) * _FACTORS[found[2].lower()]
    if rate < SLOWEST:
        raise SettingsError(f"{text} is too slow to train over: allow 64kbit or more")
    return rate


class Pacer:
    """Lets `bits_per_s` through, and 2 % more in any one second (5 % at the slowest), whoever asks and from any thread.

    It hands out appointments in the order of asking: each has a time of `clock` from which its bytes may be sent. What
    was not used for 20 ms is lost, so that silence saves up no burst.
    """

    def __init__(self, bits_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bits_per_s / 8
        self.clock = clock
        self._burst_bytes = max(400, int(self.bytes_per_s * _BURST_S))
        self._paid_until = -math.inf
        self._lock = threading.Lock()

    def reserve(self, wanted_bytes: int) -> tuple[int, float]:
        """How many of the wanted bytes may be sent in one piece (at least 1), and from when on."""
        granted = max(1, min(wanted_bytes, self._burst_bytes // 2))
        with self._lock:
            earliest = self.clock() - self._burst_bytes / self.bytes_per_s
            self._paid_until = max(self._paid_until, earliest) + granted / self.bytes_per_s
            return granted, self._paid_until
