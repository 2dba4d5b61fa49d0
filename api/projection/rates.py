"""The speed of a job: samples per second over a sliding window."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_MS = 10_000


@dataclass(slots=True)
class Rate:
    """Samples counted at certain times (milliseconds, the broker's clock).

    The rate covers the ten seconds before the newest step, or the newest step alone where steps take longer. It falls
    once the next step is overdue, and is 0 after three steps' time without a step (at least ten seconds).
    """

    points: deque[tuple[int, int]] = field(default_factory=deque)
    total: int = 0
    """Samples of all points but the first, which only marks the start of the window."""

    def add(self, at_ms: int, samples: int) -> None:
        """Record `samples` more, counted by `at_ms`."""
        points = self.points
        if points:
            self.total += samples
        points.append((at_ms, samples))
        while len(points) > 2 and points[0][0] < at_ms - WINDOW_MS:
            points.popleft()
            self.total -= points[0][1]

    def value(self, now_ms: int) -> float:
        """Samples per second at `now_ms`."""
        if len(self.points) < 2:
            return 0.0
        last_ms = self.points[-1][0]
        span_ms, idle_ms = last_ms - self.points[0][0], now_ms - last_ms
        step_ms = span_ms / (len(self.points) - 1)
        if idle_ms > max(WINDOW_MS, 3 * step_ms):
            return 0.0
        return 1000 * self.total / max(1, span_ms + max(0, idle_ms - step_ms))


@dataclass(slots=True)
class JobRates:
    """The rate of a job, and the rates of its workers."""

    job: Rate = field(default_factory=Rate)
    workers: dict[str, Rate] = field(default_factory=dict)

    def of(self, worker: str) -> Rate:
        return self.workers.setdefault(worker, Rate())
