"""Combinations of updates that tolerate a minority of bad workers: `combine` and `max_norm`, and when they may be used.

Source: Yin et al., arXiv:1803.01498 (coordinate-wise median and trimmed mean); Huber (1964).
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from computeshare.jobspec.quorum import bad_values, tolerated
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.averages import Average, Mean, Robust, clipped, huber, mean, median, stacked, trimmed_mean
from computeshare.strategies.base import Contributions, Strategy
from computeshare.types import Vector


class RobustStrategy(Strategy):
    """A strategy whose updates are combined by their mean, or so that a minority of bad workers cannot outvote the
    others: then no worker makes more than its share of a version.
    """

    sized_by: ClassVar[str] = "micro_batch"
    """The fields that determine the number of units in an epoch."""

    remedy: ClassVar[str] = 'set at least 3 minimum workers (workers.min) and {"strategy": {"combine": "huber"}}'

    combine: Literal["mean", "median", "trimmed_mean", "huber"] = Field(
        "mean", description="how a round's updates are combined; all but mean tolerate bad workers"
    )
    max_norm: float | None = Field(None, gt=0, description="clip each update to this Euclidean norm")

    def check(self, plan: Plan, fewest: int) -> None:
        """Refuse a robust `combine` if the job's rounds let bad workers outvote the others. Raises ValueError."""
        per_round, sharers = plan.units_per_round, self.sharers(fewest)
        if not sharers:
            return
        for count in sorted({per_round, plan.last_round_count}, reverse=True):
            if 2 * bad_values(count, sharers) >= count:
                where = "rounds" if count == per_round else "an epoch's last round"
                raise ValueError(
                    f"combine {self.combine} tolerates {tolerated(sharers)} bad of {sharers} workers only if they "
                    f"compute less than half of a round, which is impossible in {where} of {count} {self.units}: "
                    f"make {self.units_from} a multiple of workers.min ({sharers})"
                    + ("" if count == per_round else f", and choose {self.sized_by} so that the last round is one, too")
                )

    def sharers(self, fewest: int) -> int:
        """`fewest` if `combine` is robust and tolerates at least one bad worker; else 0."""
        return fewest if self.combine != "mean" and tolerated(fewest) else 0

    @property
    def needs_norms(self) -> bool:
        """Whether updates are clipped to `max_norm`."""
        return self.max_norm is not None

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The mean of the updates weighted by samples, or their coordinate-wise robust estimate."""
        if self.combine == "mean":
            return mean(self.clipped(updates, about), about.samples, out)
        return self.robust(self.clipped(updates, about), about)

    def clipped(self, updates: Iterable[Vector], about: Contributions) -> Iterable[Vector]:
        """The updates, clipped to `max_norm` if there is one."""
        return updates if self.max_norm is None else clipped(updates, self.max_norm, about.norms)

    def robust(self, updates: Iterable[Vector], about: Contributions) -> Vector:
        """The updates' coordinate-wise median, trimmed mean or Huber estimate; `combine` must be one of these."""
        count = len(about.samples)
        if self.combine == "median":
            return median(stacked(updates, count))
        combination = huber if self.combine == "huber" else trimmed_mean
        return combination(stacked(updates, count), bad_values(count, about.workers))

    def average(self, samples: Sequence[int], workers: int) -> Average:
        """The average of the updates' buffers, such as running variances: robust if `combine` is."""
        if self.combine == "mean":
            return Mean(sum(samples))
        return Robust(lambda buffers: self.robust(buffers, Contributions(samples, workers=workers)))
