"""How fast a job is going: samples per second over a sliding window."""

from collections import deque
from dataclasses import dataclass, field

WINDOW_MS = 10_000


@dataclass(slots=True)
class Rate:
    """Samples counted at certain times (milliseconds, the broker's clock).

    Looks back ten seconds, or to the step before the last one where steps take longer; so a slow job has a rate, and
    one that stalls sees it fall steadily.
    """

    points: deque[tuple[int, int]] = field(default_factory=deque)
    total: int = 0
    """Samples of all points but the first: that one only says when the window begins."""

    def add(self, at_ms: int, samples: int) -> None:
        """Note that `samples` more were done by `at_ms`."""
        if self.points:
            self.total += samples
        self.points.append((at_ms, samples))

    def value(self, now_ms: int) -> float:
        """Samples per second at `now_ms`."""
        points = self.points
        while len(points) > 2 and points[1][0] <= now_ms - WINDOW_MS:
            points.popleft()
            self.total -= points[0][1]
        if len(points) < 2:
            return 0.0
        return 1000 * self.total / max(1, now_ms - points[0][0])


@dataclass(slots=True)
class Rates:
    """A job's rate and those of its workers."""

    job: Rate = field(default_factory=Rate)
    workers: dict[str, Rate] = field(default_factory=dict)

    def of(self, worker: str) -> Rate:
        return self.workers.setdefault(worker, Rate())
