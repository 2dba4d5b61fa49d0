"""Buffered asynchronous SGD: combines the first updates to arrive, with less weight for stale updates."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from computeshare.jobspec.controls import ROUND, Control
from computeshare.strategies.averages import Mean
from computeshare.strategies.base import LARGEST_ROUND, Contributions
from computeshare.strategies.robust import RobustStrategy
from computeshare.strategies.staleness import Weighting, weight
from computeshare.types import Vector


class AsyncStrategy(RobustStrategy):
    """Buffered asynchronous SGD (FedBuff, arXiv:2106.06639): a version combines the first `buffer` updates to arrive,
    including updates computed on earlier versions. With a robust `combine`, no worker makes more than its share of the
    buffer, so a version needs updates from as many workers as the job waits for.
    """

    suits: ClassVar[str] = "for fast and slow machines together"
    may_be_private: ClassVar[bool] = True
    instead: ClassVar[Mapping[str, str]] = {"micro_batches_per_round": "set strategy.buffer instead"}
    units_from: ClassVar[str] = "strategy.buffer"
    takes_any: ClassVar[bool] = True

    kind: Literal["async"] = "async"
    buffer: Annotated[int, Control(ROUND, None)] = Field(
        10, ge=1, le=LARGEST_ROUND, title="Buffer size", description="updates per version, one micro-batch each"
    )
    max_staleness: Annotated[int, Control(ROUND, None)] = Field(
        10,
        ge=0,
        le=1000,
        title="Maximum staleness",
        description="in versions; a staler update is discarded and its micro-batch computed again",
    )
    weighting: Weighting = Field("inverse_sqrt", description="how an update's weight decreases with its staleness")

    @property
    def implied(self) -> dict[str, Any]:
        """A round has as many micro-batches as the buffer."""
        return {"micro_batches_per_round": self.buffer}

    @property
    def recent(self) -> int:
        """`max_staleness` versions and the current one."""
        return 1 + self.max_staleness

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The sum of weight x samples x update, over the sum of samples.

        The divisor leaves out the staleness weights, so that a buffer full of stale updates makes a shorter step;
        divided by the sum of the weights, it would make a full step. (FedBuff divides by the number of updates, which
        have the same size there.) Staleness does not discount the model's buffers: their mean is weighted by samples.

        With a robust `combine`, the robust estimate of the updates times their staleness weights. Updates are
        clipped to `max_norm` before they are discounted.
        """
        staleness = about.staleness or [0] * len(about.samples)
        weights = [weight(self.weighting, late) for late in staleness]
        updates = self.clipped(updates, about)
        if self.combine != "mean":
            discounted = (update * np.float32(part) for update, part in zip(updates, weights, strict=True))
            return self.robust(discounted, about)
        total = Mean(sum(about.samples), out)
        for update, count, part in zip(updates, about.samples, weights, strict=True):
            total.add(update, count * part)
        return total.value
