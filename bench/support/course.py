"""The course of one training: the time, samples, bytes and test accuracy of each version. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

WARM_UP = 0.1
"""Fraction of the rounds at the start that is not timed."""


@dataclass(frozen=True, slots=True)
class Point:
    """A version: seconds since training began, and totals over all workers up to then.

    Bytes are Ethernet frames on the workers' links, including headers and retransmissions; 0 without links.
    """

    version: int
    seconds: float
    samples: int
    bytes_up: float = 0.0
    bytes_down: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """Versions in order, at least two, and the test accuracy (a fraction) of the scored versions."""

    points: tuple[Point, ...]
    accuracy: Mapping[int, float] = field(default_factory=dict)
    step_s: float = 0.0
    """Seconds of a version's computing if nothing were sent, of a peer with a step for each version; 0: not known."""

    @property
    def busy(self) -> float:
        """The share of the time spent computing, by `step_s`."""
        return min(1.0, self.step_s * self.rounds_per_s)

    def timed(self) -> tuple[Point, Point]:
        """The first and last version of the timed part. Raises ValueError: too few versions."""
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
        """Bytes per round up and down, over all workers."""
        first, last = self.timed()
        rounds = last.version - first.version
        return (last.bytes_up - first.bytes_up) / rounds, (last.bytes_down - first.bytes_down) / rounds

    def accuracy_at(self, samples: int) -> float | None:
        """Accuracy of the last scored version with at most this many samples; None without such a version."""
        found = [self.accuracy[p.version] for p in self.points if p.version in self.accuracy and p.samples <= samples]
        return found[-1] if found else None

    def reached(self, accuracy: float) -> Point | None:
        """The first scored version with at least this accuracy."""
        return next((p for p in self.points if self.accuracy.get(p.version, -1.0) >= accuracy), None)
