"""Local SGD and DiLoCo: workers take local steps; the mean pseudo-gradient makes one outer step on the server."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.optimizer_spec import OptimizerSpec, changing
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.base import LARGEST_LOCAL_ROUND, LARGEST_ROUND, Contributions, Delay
from computeshare.strategies.robust import RobustStrategy
from computeshare.types import Vector

DELAYED = {"outer_lr": 0.6, "outer_momentum": 0.0}
"""The default outer step with a delay: a momentum would go on with updates that the next ones do not know of yet."""
ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 1e-3}
"""The default optimizer of a replica's own steps."""
OVERLAPPING = 0.4
"""The share of the inner steps that overlap where `codec: auto` lets them: more were measured to cost a GPT loss."""


class LocalStrategy(RobustStrategy):
    """Local SGD and DiLoCo (arXiv:2311.08105): each of `replicas` takes `inner_steps` steps from the version's weights,
    a micro-batch each; the server steps on their mean pseudo-gradient, with Nesterov momentum. `combine` may take the
    pseudo-gradients' median or trimmed mean instead, and `max_norm` clips each.

    An outer rate of 1 and a momentum of 0 give plain local SGD: the mean of the replicas' weights.
    """

    suits: ClassVar[str] = "for slow links"
    instead: ClassVar[Mapping[str, str]] = {
        "micro_batches_per_round": "a round has strategy.replicas x strategy.inner_steps micro-batches",
        "optimizer": "set strategy.inner_optimizer, strategy.outer_lr and strategy.outer_momentum instead",
        "lr_scaling": "set strategy.inner_optimizer.lr instead",
    }
    units_from: ClassVar[str] = "strategy.replicas"
    rate_field: ClassVar[str] = "strategy.inner_optimizer.lr"
    unit: ClassVar[str] = "replica"
    units: ClassVar[str] = "replicas"
    lease: ClassVar[str] = "work unit"
    sized_by: ClassVar[str] = "micro_batch or strategy.inner_steps"
    suspects: ClassVar[bool] = True  # the others agree, after many steps each
    most_unmeasured: ClassVar[int] = 1  # a unit is long: others may come meanwhile

    kind: Literal["local"] = "local"
    inner_steps: Annotated[int, Control(ROUND, None)] = Field(
        20,
        ge=1,
        le=10_000,
        title="Inner steps",
        description="optimizer steps per replica and round, one micro-batch each",
    )
    replicas: Annotated[int, Control(ROUND, None)] = Field(
        4, ge=1, le=LARGEST_ROUND, title="Replicas per round", description="at most this many workers are busy"
    )
    inner_optimizer: Annotated[OptimizerSpec, changing(ADAMW)] = Field(
        default_factory=lambda: OptimizerSpec(**ADAMW),
        description="for the inner steps; if it uses momentum, set outer_momentum to 0 or use small learning rates",
    )
    outer_lr: Annotated[float, Control(ROUND, None)] = Field(
        0.7, gt=0, le=1000, title="Outer learning rate", description="default with a delay: 0.6"
    )
    outer_momentum: Annotated[float, Control(ROUND, None)] = Field(
        0.9, ge=0, lt=1, title="Outer momentum", description="Nesterov momentum; 0: none; default with a delay: 0"
    )
    delay: Delay = 0
    overlap: Annotated[int, Control(ROUND, None)] = Field(
        0,
        ge=0,
        title="Overlapping steps",
        description="inner steps, fewer than inner_steps, that a replica takes from where its last unit ended, while "
        "updates and the next version are on their way; then it goes on from that version, with what these steps "
        "changed; inner_state is then kept",
    )
    inner_state: Literal["restart", "kept"] = Field(
        "restart",
        description="the inner optimizer's state: restart every round, or kept by the worker and handed over when it "
        "leaves, unless its machine joined by an invite (then the weights depend on which workers took part); kept is "
        "for combine mean",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_delay_or_overlap(cls, values: Any) -> Any:
        """Other defaults of the outer step with a delay, and of the inner state with an overlap."""
        if isinstance(values, dict) and values.get("delay") == 1:
            return DELAYED | values
        return {"inner_state": "kept"} | values if isinstance(values, dict) and values.get("overlap") else values

    @model_validator(mode="after")
    def _checked_for_delay(self) -> Self:
        if self.delay and not _settles(self.outer_lr, self.outer_momentum):
            raise ValueError(
                f"with a delay, an outer_lr of {self.outer_lr:g} and an outer_momentum of {self.outer_momentum:g} do "
                f"not settle: set outer_lr to {DELAYED['outer_lr']} and outer_momentum to {DELAYED['outer_momentum']}"
            )
        return self

    @model_validator(mode="after")
    def _checked_for_overlap(self) -> Self:
        if self.overlap >= self.inner_steps:
            raise ValueError(
                f"an overlap of {self.overlap} leaves none of {self.inner_steps} inner_steps to take from the next "
                "version: set a smaller overlap"
            )
        if self.overlap and self.delay:
            raise ValueError("overlap and delay both hide the link, and exclude each other: set one of them to 0")
        if self.overlap and self.inner_state != "kept":
            raise ValueError(
                "with an overlap a worker keeps its replica's weights, and so its inner optimizer's state: set "
                "inner_state to kept, or overlap to 0"
            )
        return self

    @model_validator(mode="after")
    def _hands_over_nothing_unseen(self) -> Self:
        if self.inner_state == "kept" and self.combine != "mean":
            remedy = "inner_state to restart and overlap to 0" if self.overlap else "inner_state to restart"
            raise ValueError(
                f"combine {self.combine} does not see the inner optimizer's state, which a bad worker could hand over "
                f"to others as it likes: set {remedy}, or combine to mean"
            )
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.replicas * self.inner_steps > LARGEST_LOCAL_ROUND:
            raise ValueError(
                f"replicas x inner_steps must be at most {LARGEST_LOCAL_ROUND:,}, "
                f"not {self.replicas * self.inner_steps:,}"
            )
        return self

    @property
    def outer_optimizer(self) -> OptimizerSpec:
        """The server's optimizer, which steps on the mean pseudo-gradient."""
        nesterov = self.outer_momentum > 0
        return OptimizerSpec(name="SGD", lr=self.outer_lr, momentum=self.outer_momentum, nesterov=nesterov)

    @property
    def implied(self) -> dict[str, Any]:
        """The round's length, and the outer optimizer, whose rate is not scaled."""
        size = self.replicas * self.inner_steps
        return {"micro_batches_per_round": size, "optimizer": self.outer_optimizer, "lr_scaling": "none"}

    @property
    def steps(self) -> int:
        """Inner steps of a unit, a micro-batch each."""
        return self.inner_steps

    @property
    def steps_may_grow(self) -> bool:
        """False with a robust `combine`: an epoch of longer units might end in a round that bad workers can sway; nor
        with an overlap, which was set for these steps.
        """
        return self.combine == "mean" and not self.overlap

    def chosen(self, steps: int | None, delay: int = 0) -> Self:
        """As `Strategy.chosen`; with a delay, an outer step that would not settle is replaced by the default. Replicas
        whose state is kept get an overlap in place of the delay: it costs less, and their weights depend on who took
        part anyway.
        """
        chosen: dict[str, Any] = {"inner_steps": steps or self.inner_steps}
        if delay and self.keeps_inner and not self.delay:
            as_set = self.overlap if steps is None else 0
            chosen["overlap"] = as_set or math.ceil(OVERLAPPING * chosen["inner_steps"])
        elif delay:
            chosen |= {"delay": 1} | ({} if _settles(self.outer_lr, self.outer_momentum) else DELAYED)
        return self.model_copy(update=chosen)

    def foreseen(self, plan: Plan, version: int) -> Sequence[int]:
        """Empty: prefetching a unit's batches would take too much memory."""
        return ()

    @property
    def lag(self) -> int:
        """1 with a delay; also with an overlap, whose units begin on the version before."""
        return 1 if self.overlap else self.delay

    @property
    def early_steps(self) -> int:
        """The overlap."""
        return self.overlap

    @property
    def inner(self) -> OptimizerSpec:
        """The optimizer of a replica's own steps."""
        return self.inner_optimizer

    @property
    def keeps_inner(self) -> bool:
        """Whether replicas keep the inner optimizer's state from round to round."""
        return self.inner_state == "kept"

    @property
    def extra_vectors(self) -> int:
        """The starting weights, the pseudo-gradient, and one or two vectors of inner state; with an overlap the weights
        at the last unit's end, the starting weights in mid-unit and the change until then.
        """
        return super().extra_vectors + 2 + (1 if self.inner_optimizer.name == "SGD" else 2) + 3 * (self.overlap > 0)

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The mean of the pseudo-gradients (the version's weights minus a replica's), for the outer optimizer; or their
        coordinate-wise median or trimmed mean.

        The mean is weighted by samples: a replica that took fewer steps, at an epoch's end, has moved less and gets
        less weight.

        Source: DiLoCo, arXiv:2311.08105; with an outer rate of 1 and no momentum FedAvg, arXiv:1602.05629.
        """
        return super().gradient(updates, about, out)


def _settles(lr: float, momentum: float) -> bool:
    """Whether outer steps with a delay move towards an optimum which every replica reaches.

    There a pseudo-gradient is the distance x of the version it was computed on, so that the distances follow
    x[t+1] = x[t] - lr (x[t-1] + m v[t]), v[t] = m v[t-1] + x[t-1]. By Jury's criterion for its characteristic
    polynomial z^3 - (1 + m) z^2 + (m + lr (1 + m)) z - lr m, they shrink if m + lr (1 - m^2) < 1 - (lr m)^2.
    """
    return momentum + lr * (1 - momentum**2) < 1 - (lr * momentum) ** 2
