"""Synchronous SGD: combines the gradients of all micro-batches of a round."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from computeshare.jobspec.quorum import bad_values, tolerated
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.averages import clipped, mean, median, stacked, trimmed_mean
from computeshare.strategies.base import Contributions, Strategy
from computeshare.types import Vector


class SyncStrategy(Strategy):
    """Synchronous SGD: a version combines all micro-batches of its round. With a quorum below 1, late micro-batches are
    carried over to the next round.
    """

    suits: ClassVar[str] = "same result as on one machine"

    kind: Literal["sync"] = "sync"
    quorum: float = Field(
        1.0, ge=0.5, le=1, description="fraction of the micro-batches that a round needs after its deadline; 1: all"
    )
    combine: Literal["mean", "median", "trimmed_mean"] = Field(
        "mean", description="how a round's updates are combined; median and trimmed_mean tolerate bad workers"
    )
    max_norm: float | None = Field(None, gt=0, description="clip each update to this Euclidean norm")

    def check(self, plan: Plan, fewest: int) -> None:
        """Refuse a robust `combine` if the job's rounds let bad workers outvote the others. Raises ValueError."""
        per_round, sharers = plan.micro_batches_per_round, self.sharers(fewest)
        if not sharers:
            return
        if self.quorum < 1:
            raise ValueError(
                f"combine {self.combine} tolerates bad workers only in complete rounds: "
                f"set quorum to 1, or combine to mean"
            )
        for count in sorted({per_round, plan.last_round_count}, reverse=True):
            if 2 * bad_values(count, sharers) >= count:
                where = "rounds" if count == per_round else "an epoch's last round"
                raise ValueError(
                    f"combine {self.combine} tolerates {tolerated(sharers)} bad of {sharers} workers only if they "
                    f"compute less than half of a round, which is impossible in {where} of {count} micro-batches: "
                    f"make micro_batches_per_round a multiple of workers.min ({sharers})"
                    + ("" if count == per_round else ", and choose micro_batch so that the last round is one, too")
                )

    def quorum_of(self, is_last: bool) -> float:
        """The quorum; 1 for last rounds, whose late micro-batches no round could take over."""
        return 1.0 if is_last else self.quorum

    def sharers(self, fewest: int) -> int:
        """`fewest` if `combine` is robust and tolerates at least one bad worker; else 0."""
        return fewest if self.combine != "mean" and tolerated(fewest) else 0

    @property
    def needs_norms(self) -> bool:
        """Whether updates are clipped to `max_norm`."""
        return self.max_norm is not None

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The mean of the updates weighted by samples, or their coordinate-wise median or trimmed mean."""
        count = len(about.samples)
        if self.max_norm is not None:
            updates = clipped(updates, self.max_norm, about.norms)
        match self.combine:
            case "mean":
                return mean(updates, about.samples, out)
            case "median":
                return median(stacked(updates, count))
            case "trimmed_mean":
                return trimmed_mean(stacked(updates, count), bad_values(count, about.workers))
