"""Buffered asynchronous SGD: a version from the updates that came first, the late ones at a discount."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.jobspec.staleness import Weighting, weight
from computeshare.strategies.averages import Mean
from computeshare.strategies.base import LARGEST_ROUND, Contributions, Strategy
from computeshare.types import Vector


class AsyncStrategy(Strategy):
    """Buffered asynchronous SGD (FedBuff, arXiv:2106.06639): a version is made of the `buffer` updates that arrive
    first, also of those computed on an earlier version.
    """

    suits: ClassVar[str] = "unequal machines"
    instead: ClassVar[Mapping[str, str]] = {
        "micro_batches_per_round": "its buffer says how many micro-batches make a version"
    }
    units_from: ClassVar[str] = "strategy.buffer"
    takes_any: ClassVar[bool] = True

    kind: Literal["async"] = "async"
    buffer: Annotated[int, Control(ROUND, None)] = Field(
        10, ge=1, le=LARGEST_ROUND, title="Buffer", description="updates that make a version, of a micro-batch each"
    )
    max_staleness: Annotated[int, Control(ROUND, None)] = Field(
        10,
        ge=0,
        le=1000,
        title="Staleness at most",
        description="how many versions late; what is later is computed again",
    )
    weighting: Weighting = Field("inverse_sqrt", description="how an update's weight falls with its staleness")

    @property
    def implied(self) -> dict[str, Any]:
        """The buffer is the round."""
        return {"micro_batches_per_round": self.buffer}

    def round(self, plan: Plan, version: int, carried: Sequence[int]) -> Round:
        """Any units of the epoch, as many as are buffered."""
        return plan.window(version)

    def foreseen(self, plan: Plan, version: int) -> Sequence[int]:
        """None: which units will be left depends on who is how fast."""
        return ()

    @property
    def waits_for_slowest(self) -> bool:
        """It waits for nobody."""
        return False

    @property
    def recent(self) -> int:
        """The versions that an update may be late by, and the current one."""
        return 1 + self.max_staleness

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The sum of weight x samples x update, over the sum of samples.

        The weights are not in the divisor: a buffer of updates that are all late makes a shorter step, one that they
        agree on as much as on their direction. Divided by the sum of the weights, late updates among themselves would
        count in full. (FedBuff divides by the number of updates, which are of one size there.) Buffers are no steps:
        their mean is weighted by samples alone.
        """
        total = Mean(sum(about.samples), out)
        staleness = about.staleness or [0] * len(about.samples)
        for update, count, late in zip(updates, about.samples, staleness, strict=True):
            total.add(update, count * weight(self.weighting, late))
        return total.value
