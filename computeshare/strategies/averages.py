"""Averages of vectors, with their bits fixed by the order given."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from computeshare.tensors.layout import BUCKET
from computeshare.types import Vector

PIECE = 1 << 17
"""Values added up at a time, so that they stay in the processor's cache."""
TRIMMED = 0.2
"""Least share of the values that `trimmed_mean` leaves out at each end of every coordinate."""


class Mean:
    """A mean weighted by samples, added up in the order given; holds one vector, and works on it piece by piece."""

    def __init__(self, total: int, out: Vector | None = None) -> None:
        """`total`: samples of all the vectors to come; `out`: where to add them up."""
        self._total, self._out = total, out
        self._sum: Vector | None = None
        self._scratch: Vector | None = None

    def add(self, vector: Vector, samples: float) -> None:
        """Count `vector` as `samples` of the total; a fraction where some of them count less."""
        weight = np.float32(samples / self._total)
        if self._sum is None or self._scratch is None:
            self._sum = np.multiply(vector, weight, out=self._out)
            self._scratch = np.empty(min(PIECE, len(vector)), np.float32)
            return
        for start in range(0, len(vector), PIECE):
            piece = vector[start : start + PIECE]
            self._sum[start : start + PIECE] += np.multiply(piece, weight, out=self._scratch[: len(piece)])

    @property
    def value(self) -> Vector:
        if self._sum is None:
            raise ValueError("a round has at least one micro-batch")
        return self._sum


def mean(updates: Iterable[Vector], samples: Sequence[int], out: Vector | None = None) -> Vector:
    """The mean weighted by samples, added up in the order given, in `out` if that is given."""
    total = Mean(sum(samples), out)
    for update, count in zip(updates, samples, strict=True):
        total.add(update, count)
    return total.value


def median(updates: Vector) -> Vector:
    """The coordinate-wise median of (n, d), which is sorted in place."""
    updates.sort(axis=0)
    middle = len(updates) // 2
    if len(updates) % 2:
        odd: Vector = updates[middle].copy()
        return odd
    between: Vector = (updates[middle - 1] + updates[middle]) / np.float32(2)
    return between


def trimmed_mean(updates: Vector, bad: int = 0) -> Vector:
    """The coordinate-wise mean of (n, d), which is sorted in place, without the largest and smallest 20 %, or without
    as many as may be `bad` if those are more (Yin et al., arXiv:1803.01498).
    """
    cut = max(int(TRIMMED * len(updates)), bad)
    updates.sort(axis=0)
    mean: Vector = updates[cut : len(updates) - cut].mean(axis=0, dtype=np.float32)
    return mean


def stacked(updates: Iterable[Vector], count: int) -> Vector:
    """The updates as rows, in a matrix that is the only one of its size."""
    rows: Vector | None = None
    for index, update in enumerate(updates):
        if rows is None:
            rows = np.empty((count, len(update)), np.float32)
        rows[index] = update
    if rows is None:
        raise ValueError("a round has at least one micro-batch")
    return rows


def square(bucket: Vector) -> float:
    """The squared Euclidean norm of a bucket; an update's is the sum over its buckets, in their order."""
    return float(np.dot(bucket, bucket))


def clipped(updates: Iterable[Vector], max_norm: float, norms: Sequence[float] = ()) -> Iterator[Vector]:
    """The updates, those longer than `max_norm` scaled to that.

    Args:
        norms: of the whole updates, where these are buckets of them.
    """
    for index, update in enumerate(updates):
        length = norms[index] if norms else norm(update)
        yield update if length <= max_norm else update * np.float32(max_norm / length)


def norm(update: Vector) -> float:
    """The Euclidean norm of a whole update."""
    return math.sqrt(sum(square(update[start : start + BUCKET]) for start in range(0, len(update), BUCKET)))
