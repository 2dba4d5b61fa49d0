"""SignSGD with majority vote: every micro-batch votes on the direction of every weight."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.strategies.averages import PIECE
from computeshare.strategies.base import Contributions, Strategy
from computeshare.types import Vector


class SignStrategy(Strategy):
    """SignSGD with majority vote (arXiv:1802.05880, 1810.05291): workers send only the signs of each micro-batch's
    gradient, and each weight moves by `lr` against the majority's sign.

    Micro-batches vote, not workers: the outcome does not depend on which workers take part.
    """

    suits: ClassVar[str] = "majority vote over the signs of gradients"
    instead: ClassVar[Mapping[str, str]] = {
        "optimizer": "set strategy.lr instead",
        "lr_scaling": "set strategy.lr instead",
    }
    rate_field: ClassVar[str] = "strategy.lr"

    kind: Literal["signsgd"] = "signsgd"
    lr: Annotated[float, Control(ROUND, None)] = Field(
        0.001, gt=0, le=1000, title="Step size", description="the change of each weight per version"
    )

    @property
    def implied(self) -> dict[str, Any]:
        """Plain SGD with the rate `lr`, whatever the number of votes."""
        return {"optimizer": OptimizerSpec(name="SGD", lr=self.lr), "lr_scaling": "none"}

    def sent(self, values: Vector) -> Vector:
        """A micro-batch's votes: -1, 0 or 1."""
        return np.sign(values)

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The sign of the sum of the votes; 0 for a tie, which leaves the weight unchanged.

        Votes are reduced to signs again, because a lossy codec or a bad worker may send other numbers.
        """
        total: Vector | None = None
        for update in updates:
            if total is None:
                total = np.sign(update, out=out)
                continue
            for start in range(0, len(update), PIECE):
                total[start : start + PIECE] += np.sign(update[start : start + PIECE])
        assert total is not None, "a round has at least one micro-batch"
        return np.sign(total, out=total)
