"""Pipeline: the layers of a model are spread over workers, so that no worker needs to hold all of it."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.averages import mean
from computeshare.strategies.base import LEAST_VECTORS, MOST_STAGES, STAGE_VECTORS, Contributions, Strategy
from computeshare.types import Vector


class PipelineStrategy(Strategy):
    """Pipeline parallelism (GPipe, arXiv:1811.06965; PipeDream-Flush, arXiv:2104.04473): the model is split into
    stages, runs of consecutive layers, and a chain of workers computes a micro-batch, with its `accumulate` pieces
    under way at once.

    The worker with the first stage leases the micro-batch. Activations and gradients travel through the broker. Each
    worker sends its own stages' part of the update, and reads its own stages' part of each version, so that the rounds
    are those of `sync`, with chains of workers in place of workers.
    """

    suits: ClassVar[str] = "a model that no worker can hold"
    per_unit: ClassVar[str] = "a worker per stage"
    unfit: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "precision": ("float32", "stages compute in float32: leave precision out"),
        "compile": (False, "stages are not compiled: leave compile out"),
        "channels_last": (False, "stages keep torch's default order: leave channels_last out"),
    }

    kind: Literal["pipeline"] = "pipeline"
    stages: Annotated[int, Control(ROUND, None)] = Field(
        2,
        ge=2,
        le=MOST_STAGES,
        title="Stages",
        description="runs of consecutive layers; a worker holds one or, with fewer workers than stages, several",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        "1f1b",
        description="gpipe: all pieces forward, then all backward; 1f1b: each piece backward as soon as it can be, so "
        "that a worker keeps fewer pieces' activations; the same bits",
    )
    recompute: bool = Field(
        False, description="compute each piece's forward pass again before its backward pass, to save memory"
    )
    activations: str = Field(
        "float32",
        max_length=20,
        description="codec of the activations and gradients that travel between stages: float32, float16, bfloat16, "
        "int8 or int4",
    )
    split: tuple[str, ...] = Field(
        (),
        strict=False,
        max_length=MOST_STAGES - 1,
        description="names of the submodules with which the second and each later stage begins, such as blocks.2; "
        "empty: stages of similar size",
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.split and len({*self.split}) != self.stages - 1:
            raise ValueError(
                f"split must name {self.stages - 1} different submodules, one for each stage after the first, or none"
            )
        return self

    @property
    def staging(self) -> Self:
        """This strategy: its fields say how a model is split."""
        return self

    @property
    def extra_vectors(self) -> int:
        """Of a stage, as `STAGE_VECTORS` says."""
        return STAGE_VECTORS - LEAST_VECTORS

    def most_workers(self, plan: Plan) -> int:
        """A chain of workers for each micro-batch of a round, with a worker for each stage."""
        return plan.units_per_round * self.stages

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The mean of the gradients of all micro-batches, weighted by samples, as in `sync`."""
        return mean(updates, about.samples, out)
