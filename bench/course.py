"""The course of one training: when each version came, after how many samples and bytes, and what it was worth. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

WARM_UP = 0.1
"""Share of the rounds that is not timed, at the start."""


@dataclass(frozen=True, slots=True)
class Point:
    """A version: seconds since training began, and totals over all workers until then.

    Bytes are those of frames on the workers' links, headers and repeats included; 0 where there are no links.
    """

    version: int
    seconds: float
    samples: int
    bytes_up: float = 0.0
    bytes_down: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """Versions in order, at least two, and the test accuracy (a fraction) of those that were scored."""

    points: tuple[Point, ...]
    accuracy: Mapping[int, float] = field(default_factory=dict)

    def timed(self) -> tuple[Point, Point]:
        """The ends of the part that counts for rates. Raises ValueError: too few versions."""
        if len(self.points) < 2:
            raise ValueError(f"{len(self.points)} versions came in the time given: too few to tell a rate from")
        warm = min(int(WARM_UP * len(self.points)), len(self.points) - 2)
        return self.points[warm], self.points[-1]

    @property
    def rounds_per_s(self) -> float:
        first, last = self.timed()
        return (last.version - first.version) / (last.seconds - first.seconds)

    @property
    def samples_per_s(self) -> float:
        first, last = self.timed()
        return (last.samples - first.samples) / (last.seconds - first.seconds)

    @property
    def bytes_per_round(self) -> tuple[float, float]:
        """Up and down, over all workers."""
        first, last = self.timed()
        rounds = last.version - first.version
        return (last.bytes_up - first.bytes_up) / rounds, (last.bytes_down - first.bytes_down) / rounds

    def accuracy_at(self, samples: int) -> float | None:
        """Of the last scored version that had seen at most this many samples."""
        found = [self.accuracy[p.version] for p in self.points if p.version in self.accuracy and p.samples <= samples]
        return found[-1] if found else None

    def reached(self, accuracy: float) -> Point | None:
        """The first scored version at least that good."""
        return next((p for p in self.points if self.accuracy.get(p.version, -1.0) >= accuracy), None)
