"""Local SGD and DiLoCo: the replicas' way becomes the gradient of one outer step."""

from collections.abc import Iterable, Sequence

from computeshare.strategies import sync
from computeshare.types import Vector


def combine(updates: Iterable[Vector], samples: Sequence[int], out: Vector | None = None) -> Vector:
    """The round's pseudo-gradient, on which the outer optimizer (`LocalStrategy.outer_optimizer`) steps.

    Weighted by samples: a replica that took fewer steps, at an epoch's end, went less far, and counts for less of the
    mean.

    Args:
        updates: one pseudo-gradient per unit, the version's weights minus the replica's, shape (d,) float32, in the
            order of units; read once.
        samples: how many samples each replica stepped through.
        out: where to add them up, if it is given.
    Returns: shape (d,), float32.
    Source: DiLoCo, arXiv:2311.08105; with an outer rate of 1 and no momentum FedAvg, arXiv:1602.05629.
    """
    return sync.mean(updates, samples, out)
