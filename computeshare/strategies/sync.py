"""Synchronous SGD: combines the gradients of all micro-batches of a round."""

from typing import ClassVar, Literal

from pydantic import Field

from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.base import Delay
from computeshare.strategies.robust import RobustStrategy


class SyncStrategy(RobustStrategy):
    """Synchronous SGD: a version combines all micro-batches of its round. With a quorum below 1, late micro-batches are
    carried over to the next round.
    """

    suits: ClassVar[str] = "same result as on one machine"
    may_be_private: ClassVar[bool] = True

    kind: Literal["sync"] = "sync"
    quorum: float = Field(
        1.0, ge=0.5, le=1, description="fraction of the micro-batches that a round needs after its deadline; 1: all"
    )

    delay: Delay = 0

    @property
    def lag(self) -> int:
        """The delay."""
        return self.delay

    def check(self, plan: Plan, fewest: int) -> None:
        """As `RobustStrategy.check`; a robust `combine` and a delay also need complete rounds. Raises ValueError."""
        if self.delay and self.quorum < 1:
            raise ValueError("a round's delay is fixed only if it waits for all: set quorum to 1, or delay to 0")
        if self.sharers(fewest) and self.quorum < 1:
            raise ValueError(
                f"combine {self.combine} tolerates bad workers only in complete rounds: "
                f"set quorum to 1, or combine to mean"
            )
        super().check(plan, fewest)

    def quorum_of(self, is_last: bool) -> float:
        """The quorum; 1 for last rounds, whose late micro-batches no round could take over."""
        return 1.0 if is_last else self.quorum
