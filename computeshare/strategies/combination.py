"""One gradient from a round's updates, by whatever strategy the job has."""

from collections.abc import Iterable, Sequence

from computeshare.jobspec.strategy_fields import AnyStrategy, AsyncStrategy, LocalStrategy, SyncStrategy
from computeshare.strategies import buffered_async, local, sync
from computeshare.types import Vector


def combine(
    strategy: AnyStrategy,
    updates: Iterable[Vector],
    samples: Sequence[int],
    workers: int = 1,
    staleness: Sequence[int] = (),
    norms: Sequence[float] | None = None,
    out: Vector | None = None,
) -> Vector:
    """The gradient that the server's optimizer steps on, or a bucket of it from that bucket of the updates.

    Args:
        updates: one update per unit, shape (d,) float32, in the order of units; read once.
        samples: how many samples each stands for.
        workers: the fewest that share a round, for `sync`.
        staleness: how many versions each one's weights were behind, for `async`; none: all are fresh.
        norms, out: as for `sync.combine`.
    Returns: shape (d,), float32.
    """
    match strategy:
        case SyncStrategy():
            return sync.combine(strategy, updates, samples, workers, norms, out)
        case AsyncStrategy():
            return buffered_async.combine(strategy, updates, samples, staleness or [0] * len(samples), out)
        case LocalStrategy():
            return local.combine(updates, samples, out)
