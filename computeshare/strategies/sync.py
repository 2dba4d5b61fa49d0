"""Synchronous SGD: one combined gradient from all micro-batches of a round."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from computeshare.jobspec.quorum import bad_values
from computeshare.jobspec.strategy_fields import SyncStrategy
from computeshare.tensors.layout import BUCKET
from computeshare.types import Vector

PIECE = 1 << 17
"""Values added up at a time, so that they stay in the processor's cache."""
TRIMMED = 0.2
"""Least share of the values that `trimmed_mean` leaves out at each end of every coordinate."""


def combine(
    strategy: SyncStrategy,
    updates: Iterable[Vector],
    samples: Sequence[int],
    workers: int = 1,
    norms: Sequence[float] | None = None,
    out: Vector | None = None,
) -> Vector:
    """The round's gradient, or a bucket of it from that bucket of the updates.

    Args:
        updates: one mean gradient per micro-batch, shape (d,) float32, in micro-batch order; read once.
        samples: how many samples each stands for.
        workers: the fewest that share a round, of which fewer than half may be bad.
        norms: of the whole updates, where these are buckets of them and the strategy has a `max_norm`.
        out: where a mean is added up, if it is given.
    Returns: shape (d,), float32.
    """
    if strategy.max_norm is not None:
        updates = _clipped(updates, strategy.max_norm, norms)
    match strategy.combine:
        case "mean":
            return mean(updates, samples, out)
        case "median":
            return median(_stacked(updates, len(samples)))
        case "trimmed_mean":
            return trimmed_mean(_stacked(updates, len(samples)), bad_values(len(samples), workers))


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


def _stacked(updates: Iterable[Vector], count: int) -> Vector:
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


def _clipped(updates: Iterable[Vector], max_norm: float, norms: Sequence[float] | None) -> Iterator[Vector]:
    for index, update in enumerate(updates):
        norm = norms[index] if norms else _norm(update)
        yield update if norm <= max_norm else update * np.float32(max_norm / norm)


def _norm(update: Vector) -> float:
    return math.sqrt(sum(square(update[start : start + BUCKET]) for start in range(0, len(update), BUCKET)))
