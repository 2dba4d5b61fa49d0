"""Synchronous SGD: one combined gradient from all micro-batches of a round."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from computeshare.spec import SyncStrategy
from computeshare.types import Vector

TRIMMED = 0.2
"""Share of the values that `trimmed_mean` leaves out at each end of every coordinate."""


def combine(strategy: SyncStrategy, updates: Iterable[Vector], samples: Sequence[int]) -> Vector:
    """The round's gradient.

    Args:
        updates: one mean gradient per micro-batch, shape (d,) float32, in micro-batch order; read once.
        samples: how many samples each stands for.
    Returns: shape (d,), float32.
    """
    if strategy.max_norm is not None:
        updates = _clipped(updates, strategy.max_norm)
    match strategy.combine:
        case "mean":
            return mean(updates, samples)
        case "median":
            return np.median(np.stack(list(updates)), axis=0).astype(np.float32)
        case "trimmed_mean":
            return trimmed_mean(np.stack(list(updates)))


def mean(updates: Iterable[Vector], samples: Sequence[int]) -> Vector:
    """The mean weighted by samples, added up in the order given; holds two vectors at a time."""
    total = sum(samples)
    accumulator: Vector | None = None
    scratch: Vector | None = None
    for update, count in zip(updates, samples, strict=True):
        weight = np.float32(count / total)
        if accumulator is None:
            accumulator, scratch = update * weight, np.empty_like(update)
        else:
            accumulator += np.multiply(update, weight, out=scratch)
    if accumulator is None:
        raise ValueError("a round has at least one micro-batch")
    return accumulator


def trimmed_mean(updates: Vector) -> Vector:
    """The coordinate-wise mean of (n, d) without the largest and smallest 20 % (Yin et al., arXiv:1803.01498)."""
    cut = int(TRIMMED * len(updates))
    kept = np.sort(updates, axis=0)[cut : len(updates) - cut]
    mean: Vector = kept.mean(axis=0, dtype=np.float32)
    return mean


def _clipped(updates: Iterable[Vector], max_norm: float) -> Iterator[Vector]:
    for update in updates:
        norm = float(np.linalg.norm(update))
        yield update if norm <= max_norm else update * np.float32(max_norm / norm)
