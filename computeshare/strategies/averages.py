"""Averages of vectors; the order of the vectors determines the result's bits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from computeshare.tensors.layout import bucket_values
from computeshare.types import Vector

Matrix = NDArray[np.float64]
PIECE = 1 << 17
"""Values processed at a time, few enough for the processor's cache."""
TRIMMED = 0.2
"""Smallest share of values that `trimmed_mean` drops at each end of every coordinate."""
HUBER = np.float32(2)
"""How far from the median `huber` counts a value, in median distances: 1.35 standard deviations of a normal one."""


class Average(Protocol):
    """An average of vectors that are added one by one."""

    def add(self, vector: Vector, samples: float) -> None:
        """Add a vector that was computed from so many samples; it is not kept."""

    @property
    def value(self) -> Vector:
        """The average of the vectors added so far."""


class Mean:
    """A mean weighted by samples, accumulated in the order of `add` into a single vector."""

    def __init__(self, total: int, out: Vector | None = None) -> None:
        """`total`: samples of all vectors to be added; `out`: array to accumulate in, by default a new array."""
        self._total, self._out = total, out
        self._sum: Vector | None = None
        self._scratch: Vector | None = None

    def add(self, vector: Vector, samples: float) -> None:
        """Add `vector` with the weight `samples / total`; discounted updates have fractional samples."""
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


class Spread:
    """How far vectors, of which some buckets are added one by one, are from their mean.

    Source: West, Communications of the ACM 22 (1979), by which nothing is read twice and small distances are not lost.
    """

    def __init__(self, square: float = 0.0) -> None:
        """`square`: of vectors of which only the mean is added, the squared distances from it."""
        self.square = square
        """Sum over all vectors and buckets of the squared distance from the bucket's mean."""

    def of(self, updates: Iterable[Vector], counts: Iterable[int] | None = None) -> Iterator[Vector]:
        """Pass a bucket of each vector on, and add their distances to `square` at the end.

        Args:
            counts: how many vectors each is the mean of; by default one.
        """
        middle: Vector | None = None
        total = 0
        for update, count in zip(updates, counts or repeat(1), strict=False):
            total += count
            if middle is None:
                middle = update.copy()
            else:
                apart = update - middle
                self.square += square(apart) * count * (total - count) / total
                apart *= np.float32(count / total)
                middle += apart
            yield update


class Robust:
    """An average of whole vectors, which are kept until all were added; regardless of samples."""

    def __init__(self, combine: Callable[[Sequence[Vector]], Vector]) -> None:
        self._combine = combine
        self._vectors: list[Vector] = []

    def add(self, vector: Vector, samples: float) -> None:
        """Add a copy of the vector."""
        self._vectors.append(vector.copy())

    @property
    def value(self) -> Vector:
        return self._combine(self._vectors)


def mean(updates: Iterable[Vector], samples: Sequence[int], out: Vector | None = None) -> Vector:
    """The mean of vectors (d,), weighted by samples, accumulated in order; in `out` if given."""
    total = Mean(sum(samples), out)
    for update, count in zip(updates, samples, strict=True):
        total.add(update, count)
    return total.value


def median(updates: Vector) -> Vector:
    """The coordinate-wise median (d,) of `updates` (n, d), which is sorted in place."""
    updates.sort(axis=0)
    middle = len(updates) // 2
    if len(updates) % 2:
        odd: Vector = updates[middle].copy()
        return odd
    between: Vector = (updates[middle - 1] + updates[middle]) / np.float32(2)
    return between


def trimmed_mean(updates: Vector, bad: int = 0) -> Vector:
    """The coordinate-wise trimmed mean (d,) of `updates` (n, d), which is sorted in place.

    Drops the largest and smallest 20 % of each coordinate, or `bad` values at each end if these are more.

    Source: Yin et al., arXiv:1803.01498.
    """
    cut = max(int(TRIMMED * len(updates)), bad)
    updates.sort(axis=0)
    mean: Vector = updates[cut : len(updates) - cut].mean(axis=0, dtype=np.float32)
    return mean


def huber(updates: Vector, bad: int = 0) -> Vector:
    """Huber's estimate of the location (d,) of `updates` (n, d), one step from their coordinate-wise median, but for
    those that point away from the others, `bad` at most: a turned update would shorten every step.

    A value counts as one at most `HUBER` times the median distance from the median, of all updates.

    Source: Huber, Annals of Mathematical Statistics 35 (1964).
    """
    middle = median(updates.copy())
    apart = updates - middle
    limit = HUBER * median(np.abs(apart))
    counted = np.delete(apart, opposed(updates)[:bad] if bad else [], axis=0)
    mean: Vector = np.clip(counted, -limit, limit, out=counted).mean(axis=0, dtype=np.float32)
    return np.add(middle, mean, out=mean)


def opposed(updates: Vector) -> list[int]:
    """The rows of `updates` (n, d) that point away from most others, while these agree; the most opposed first."""
    return opposed_in(products(updates))


def products(updates: Vector) -> Matrix:
    """The inner products (n, n) of the rows of `updates` (n, d); those of whole updates are the sum of their buckets'.

    The last bits differ by machine.
    """
    found = np.zeros((len(updates), len(updates)))
    for start in range(0, updates.shape[1], PIECE):
        rows = updates[:, start : start + PIECE].astype(np.float64)
        found += rows @ rows.T
    return found


def opposed_in(products: Matrix) -> list[int]:
    """The updates that point away from most others, by their inner products (n, n); the most opposed first.

    An update's agreement is the median of its cosines with the others, which fewer than half of them cannot sway. It is
    opposed where that is below minus half of the usual agreement: honest updates of a late round may differ, too.
    """
    cosines = cosines_of(products)
    # rounded, since the last bits of the sums differ by machine
    agreements = [round(float(np.median(np.delete(each, number))), 9) for number, each in enumerate(cosines)]
    usual = max(0.0, float(np.median(agreements)))
    found = [row for row, agreement in enumerate(agreements) if usual and agreement < -usual / 2]
    return sorted(found, key=lambda row: agreements[row])


def cosines_of(products: Matrix) -> Matrix:
    """The cosines (n, n) of vectors, by their inner products (n, n); 0 with a vector of zeros."""
    lengths = np.sqrt(np.diagonal(products))
    cosines: Matrix = products / np.maximum(np.outer(lengths, lengths), np.finfo(np.float64).tiny)
    return cosines


def stacked(updates: Iterable[Vector], count: int) -> Vector:
    """The updates (d,) as the rows of one matrix (count, d)."""
    rows: Vector | None = None
    for index, update in enumerate(updates):
        if rows is None:
            rows = np.empty((count, len(update)), np.float32)
        rows[index] = update
    if rows is None:
        raise ValueError("a round has at least one micro-batch")
    return rows


def square(bucket: Vector) -> float:
    """The squared Euclidean norm of a bucket; summed over buckets in order, the squared norm of an update."""
    return float(np.dot(bucket, bucket))


def clipped(updates: Iterable[Vector], max_norm: float, norms: Sequence[float] = ()) -> Iterator[Vector]:
    """The updates, scaled down to the Euclidean norm `max_norm` if longer.

    Args:
        norms: norms of the whole updates, if `updates` are buckets.
    """
    for index, update in enumerate(updates):
        length = norms[index] if norms else norm(update)
        yield update if length <= max_norm else update * np.float32(max_norm / length)


def norm(update: Vector) -> float:
    """The Euclidean norm of a whole update."""
    step = bucket_values(len(update))
    return math.sqrt(sum(square(update[start : start + step]) for start in range(0, len(update), step)))
