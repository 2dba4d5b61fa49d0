"""The rules of a job for optimizer steps: learning-rate schedule, gradient clipping, weight decay. Pure."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import OPTIMIZER, Control
from computeshare.jobspec.part import Part

Decay = Literal["all", "matrices"]


class Schedule(Part):
    """The learning rate over the training, as a fraction of the optimizer's own rate: a function of the version."""

    name: Annotated[Literal["constant", "linear", "cosine", "step"], Control(OPTIMIZER, "--schedule")] = Field(
        "constant", title="Schedule", description="how the learning rate falls until the last round"
    )
    warmup: Annotated[float, Control(OPTIMIZER, "--warmup")] = Field(
        0,
        ge=0,
        le=100_000_000,
        title="Warm-up",
        description="rounds in which the rate rises linearly to its full value",
    )
    final: Annotated[float, Control(OPTIMIZER)] = Field(
        0, ge=0, le=1, title="Final rate", description="fraction of the learning rate that the schedule ends at"
    )
    at: tuple[float, ...] = Field(
        (0.5, 0.75),
        strict=False,
        min_length=1,
        max_length=100,
        description="for step: when the rate drops, as fractions of the training; each drop has the same factor",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == "step" and self.final == 0:
            raise ValueError(
                "schedule step needs final above 0, for example 0.01: the fraction that is left at the end"
            )
        if not all(0 < x < 1 for x in self.at) or list(self.at) != sorted(set(self.at)):
            raise ValueError(f"schedule's at must be ascending fractions between 0 and 1, not {list(self.at)}")
        return self

    def factor(self, position: float, rounds: int) -> float:
        """The fraction of the rate for the step that starts `position` rounds after version 0.

        The warm-up takes the rate to its full value at `warmup`; linear and cosine then reach `final` at `rounds`.

        Args:
            position: in rounds, 0 to `rounds`; a fraction for an inner step in mid-round.
            rounds: of the whole training.
        """
        if position < self.warmup:
            return (position + 1) / (self.warmup + 1)
        done = min(1.0, (position - self.warmup) / max(rounds - self.warmup, 1e-9))
        match self.name:
            case "linear":
                return 1 - (1 - self.final) * done
            case "cosine":
                return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
            case "step":
                return float(self.final ** (bisect_right(self.at, position / rounds) / len(self.at)))
            case _:
                return 1.0


CONSTANT = Schedule()


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules for an optimizer's steps, in addition to its arguments.

    Args:
        rounds: of the whole training.
        lr_factor: multiplies the rate.
        clip_norm: largest Euclidean norm of a step's gradient, which is scaled down to it; 0: any.
        decay: which tensors the optimizer's weight decay applies to: all, or those with two dimensions or more.
    """

    schedule: Schedule = CONSTANT
    rounds: int = 1
    lr_factor: float = 1.0
    clip_norm: float = 0.0
    decay: Decay = "all"

    def decays(self, shape: Sequence[int]) -> bool:
        """Whether weight decay applies to a tensor of this shape."""
        return self.decay == "all" or len(shape) >= 2

    def rate_factor(self, position: float) -> float:
        """The factor of the optimizer's rate for the step that starts `position` rounds after version 0."""
        return self.lr_factor * self.schedule.factor(position, self.rounds)


EVERY_STEP_ALIKE = StepRules()
"""A constant rate, no clipping, weight decay on every tensor."""
