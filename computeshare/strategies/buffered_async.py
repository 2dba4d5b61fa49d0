"""Buffered asynchronous SGD: a version from the updates that came first, the late ones at a discount."""

from collections.abc import Iterable, Sequence

from computeshare.jobspec.staleness import weight
from computeshare.jobspec.strategy_fields import AsyncStrategy
from computeshare.strategies.sync import Mean
from computeshare.types import Vector


def combine(
    strategy: AsyncStrategy,
    updates: Iterable[Vector],
    samples: Sequence[int],
    staleness: Sequence[int],
    out: Vector | None = None,
) -> Vector:
    """The gradient of a version: the sum of weight x samples x update, over the sum of samples.

    The weights are not in the divisor: a buffer of updates that are all late makes a shorter step, one that they agree
    on as much as on their direction. Divided by the sum of the weights, late updates among themselves would count in
    full. (FedBuff, arXiv:2106.06639, divides by the number of updates, which are of one size there.) Buffers are no
    steps: their mean is weighted by samples alone.

    Args:
        updates: one mean gradient per micro-batch, shape (d,) float32, in micro-batch order; read once.
        samples: how many samples each stands for.
        staleness: how many versions each one's weights were behind.
        out: where to add them up, if it is given.
    Returns: shape (d,), float32.
    """
    total = Mean(sum(samples), out)
    for update, count, late in zip(updates, samples, staleness, strict=True):
        total.add(update, count * weight(strategy.weighting, late))
    return total.value
