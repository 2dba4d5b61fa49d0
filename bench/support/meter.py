"""Bytes moved over links, as a function of time."""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from bench.links import Links, Moved

EVERY_S = 0.1


class Meter:
    """Readings of the links' counters at times of `time.time`; empty without links."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._readings: list[Moved] = []

    def note(self, at: float, moved: Moved) -> None:
        """Add a reading; times must increase."""
        self._times.append(at)
        self._readings.append(moved)

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Bytes up and down between two times."""
        (up, down), (up_before, down_before) = self._at(end), self._at(start)
        return up - up_before, down - down_before

    def _at(self, moment: float) -> tuple[float, float]:
        """The counters at a time, by linear interpolation between two readings."""
        if not self._times:
            return 0.0, 0.0
        after = min(max(1, bisect_left(self._times, moment)), len(self._times) - 1)
        t0, t1 = self._times[after - 1], self._times[after]
        share = min(1.0, max(0.0, (moment - t0) / (t1 - t0))) if t1 > t0 else 0.0
        a, b = self._readings[after - 1], self._readings[after]
        return a.up + share * (b.up - a.up), a.down + share * (b.down - a.down)


@contextmanager
def metered(links: Links | None) -> Iterator[Meter]:
    """A meter that reads the links' counters until the end of the block."""
    meter, stop = Meter(), threading.Event()
    if links is None:
        yield meter
        return
    meter.note(time.time(), links.moved())

    def read() -> None:
        while not stop.wait(EVERY_S):
            meter.note(time.time(), links.moved())

    thread = threading.Thread(target=read, name="meter", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()
        meter.note(time.time(), links.moved())
