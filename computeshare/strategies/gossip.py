"""Gossip: workers keep weights of their own, and average them in pairs while they train."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.optimizer_spec import OptimizerSpec, changing
from computeshare.strategies.averages import mean
from computeshare.strategies.base import LARGEST_LOCAL_ROUND, LARGEST_ROUND, Contributions, Strategy
from computeshare.types import Vector

ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 1e-3}
"""The default optimizer of a peer's own steps."""


class GossipStrategy(Strategy):
    """Averaging in pairs (AD-PSGD, arXiv:1710.06952): each worker, a peer, keeps its own weights. Before every unit of
    `every` steps it averages them with another peer's, read from the broker while it published its own; after it, an
    outer step with Nesterov momentum on what the unit changed (NoLoCo, arXiv:2506.10911).

    Nobody waits for a mean over all: a version is the mean of the newest weights of all peers that are there, for
    scores, checkpoints and workers that join. Peers take its weights as the reference from which their published
    weights are differences, so that a lossy codec rounds small numbers.
    """

    suits: ClassVar[str] = "averages in pairs, without waiting for others"
    instead: ClassVar[Mapping[str, str]] = {
        "micro_batches_per_round": "a round has strategy.buffer x strategy.every micro-batches",
        "optimizer": "set strategy.inner_optimizer instead",
        "lr_scaling": "set strategy.inner_optimizer.lr instead",
    }
    units_from: ClassVar[str] = "strategy.buffer"
    rate_field: ClassVar[str] = "strategy.inner_optimizer.lr"
    unit: ClassVar[str] = "work unit"
    units: ClassVar[str] = "work units"
    lease: ClassVar[str] = "work unit"
    remedy: ClassVar[str] = f"bound each exchange by strategy.max_norm, or {Strategy.remedy}"
    takes_any: ClassVar[bool] = True

    kind: Literal["gossip"] = "gossip"
    every: Annotated[int, Control(ROUND, None)] = Field(
        10,
        ge=1,
        le=10_000,
        title="Steps between exchanges",
        description="a peer's own optimizer steps between two exchanges, one micro-batch each",
    )
    buffer: Annotated[int, Control(ROUND, None)] = Field(
        16,
        ge=1,
        le=LARGEST_ROUND,
        title="Units per version",
        description="a version is made after so many units of any peers",
    )
    max_staleness: Annotated[int, Control(ROUND, None)] = Field(
        2,
        ge=0,
        le=20,
        title="Maximum staleness",
        description="in versions; a staler unit is discarded, and its peer returns to its weights from before it",
    )
    interpolation: Literal["constant", "clock", "loss"] = Field(
        "constant",
        description="the share of the other's weights in an average: constant: factor; clock: the other's part of both "
        "peers' units so far; loss: the own part of both peers' losses, so that the worse peer moves further",
    )
    factor: float = Field(0.5, ge=0, le=1, description="share of the other's weights with interpolation constant")
    divergence_threshold: float = Field(
        0, ge=0, description="a peer whose loss is below this takes a smaller share, by loss / threshold; 0: never"
    )
    fetch_probability: float = Field(1, ge=0, le=1, description="probability of an exchange after a unit")
    timeout_ms: int = Field(2000, ge=1, le=600_000, description="another peer whose weights take longer is given up")
    matching: Literal["random", "pairs"] = Field(
        "random",
        description="random: any peer, seldom a slow one; pairs: two peers read each other, and all are paired off "
        "anew after about two units of each",
    )
    max_norm: float | None = Field(
        None, gt=0, description="clip the difference between the two peers' weights to this Euclidean norm"
    )
    inner_optimizer: Annotated[OptimizerSpec, changing(ADAMW)] = Field(
        default_factory=lambda: OptimizerSpec(**ADAMW), description="a peer's own optimizer, whose state it keeps"
    )
    outer_lr: float = Field(0.85, gt=0, le=2, description="rate of the outer step on what a unit has changed")
    outer_momentum: float = Field(
        0.8,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer steps; set 0 (none) if the inner optimizer has momentum",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.buffer * self.every > LARGEST_LOCAL_ROUND:
            raise ValueError(
                f"buffer x every must be at most {LARGEST_LOCAL_ROUND:,}, not {self.buffer * self.every:,}"
            )
        return self

    @property
    def implied(self) -> dict[str, Any]:
        """The round's length, and the server's optimizer, which takes the peers' mean as it is."""
        return {
            "micro_batches_per_round": self.buffer * self.every,
            "optimizer": OptimizerSpec(name="SGD", lr=1.0),
            "lr_scaling": "none",
        }

    @property
    def steps(self) -> int:
        """Micro-batches between two exchanges."""
        return self.every

    @property
    def recent(self) -> int:
        """`max_staleness` versions and the current one: peers change their reference when they come to it."""
        return 1 + self.max_staleness

    @property
    def inner(self) -> OptimizerSpec:
        """The optimizer of a peer's own steps."""
        return self.inner_optimizer

    @property
    def keeps_inner(self) -> bool:
        """True: a peer's optimizer goes on from unit to unit, like its weights."""
        return True

    @property
    def hands_over_inner(self) -> bool:
        """False: it belongs to the peer's own weights."""
        return False

    @property
    def averaging(self) -> Self:
        """This strategy: its fields and methods say how."""
        return self

    @property
    def extra_vectors(self) -> int:
        """Also own weights now, before each of the last two units, and when another's were asked for; momentum now and
        before these units; the references, the other's weights, the difference, and inner state.
        """
        own = 6 + self.recent + (1 if self.inner_optimizer.name == "SGD" else 2) + 3 * (self.outer_momentum > 0)
        return super().extra_vectors + own

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The version's weights minus the mean of the peers' weights, weighted by samples of their units."""
        return mean(updates, about.samples, out)

    def share(self, own: tuple[int, float], other: tuple[int, float]) -> float:
        """The share of another peer's weights in the average with one's own: 0 to 1.

        Args:
            own, other: units that each peer has made so far, and the mean loss of its last.
        Source: dpwa's interpolations and divergence guard.
        """
        (clock, loss), (its_clock, its_loss) = own, other
        share = self.factor
        if self.interpolation == "clock":
            share = its_clock / (clock + its_clock) if clock + its_clock else self.factor
        elif self.interpolation == "loss":
            share = loss / (loss + its_loss) if loss + its_loss > 0 else self.factor
        if loss < self.divergence_threshold:
            share *= max(loss, 0.0) / self.divergence_threshold
        return min(1.0, max(0.0, share))

    def towards(self, own: Vector, other: Vector, share: float) -> Vector:
        """One's own weights (d,), moved by `share` of the way to another peer's; of a clipped way with `max_norm`.

        Source: ClippedGossip, He et al., arXiv:2202.01545.
        """
        way = other - own
        if self.max_norm is not None:
            length = float(np.linalg.norm(way))
            share *= min(1.0, self.max_norm / length) if length > 0 else 1.0
        way *= np.float32(share)
        way += own
        return way
