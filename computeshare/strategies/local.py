"""Local SGD and DiLoCo: the replicas' way becomes the gradient of one outer step, and how far a slow one goes."""

import math
from collections.abc import Iterable, Sequence

from computeshare.strategies import sync
from computeshare.types import Vector


def combine(updates: Iterable[Vector], samples: Sequence[int]) -> Vector:
    """The round's pseudo-gradient, on which the outer optimizer (`LocalStrategy.outer_optimizer`) steps.

    Weighted by samples: a replica that took fewer steps, at an epoch's end or because it is slow, went less far, and
    counts for less of the mean.

    Args:
        updates: one pseudo-gradient per unit, the version's weights minus the replica's, shape (d,) float32, in the
            order of units; read once.
        samples: how many samples each replica stepped through.
    Returns: shape (d,), float32.
    Source: DiLoCo, arXiv:2311.08105; with an outer rate of 1 and no momentum FedAvg, arXiv:1602.05629.
    """
    return sync.mean(updates, samples)


def scaled_steps(inner_steps: int, own_ms: float, fastest_ms: float) -> int:
    """How many of a unit's `inner_steps` a worker takes, so that it is done when the fastest one is; at least one.

    Args:
        own_ms, fastest_ms: measured milliseconds per micro-batch; a worker that was not measured yet (0) takes all.
    Source: dynamic local updates, arXiv:2401.09135.
    """
    if own_ms <= 0 or fastest_ms <= 0:
        return inner_steps
    return max(1, min(inner_steps, math.floor(inner_steps * fastest_ms / own_ms)))
