"""All stages of a model on one machine, as one replica: the bits that any chain of workers of one kind computes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from computeshare.jobspec.spec import JobSpec
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.splitter import split
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.tasks.base import TaskInstance
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.computation import LocalComputation
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Blob


@dataclass
class Loopback:
    """A `Mailbox` of a worker that holds all stages."""

    messages: dict[tuple[int, str], Blob] = field(default_factory=dict)

    def send(self, stage: int, tag: str, message: Blob) -> None:
        self.messages[stage, tag] = message

    def receive(self, stage: int, tag: str) -> Blob:
        return self.messages.pop((stage, tag))


@dataclass
class WholeReplica:
    """Computes whole units; `layout` has the cuts between stages."""

    layout: Layout
    parts: StageParts
    stages: StageReplica
    room: None = None
    kept: None = None
    compilation: Compilation = field(default_factory=Compilation)

    def load(self, weights: Weights) -> None:
        self.stages.load(self.parts.views(weights))

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Do nothing."""

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """Forward and backward over a unit, stage by stage. Raises Interrupted."""
        vector = np.zeros(self.layout.parameters, np.float32)

        def put(bucket: int, values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> None:
            vector[self.layout.buckets[bucket]] = values

        updates = self.stages.compute(unit, Loopback(), goes_on, take or put)
        buffers = np.zeros(self.layout.buffers, np.float32)
        self.parts.put_buffers(buffers, self.parts.joined_buffers([one.buffers for one in updates]))
        loss = next(one.loss for one in updates if one.loss is not None)
        return Update(vector, buffers, loss)


def whole_computation(spec: JobSpec, instance: TaskInstance, device: torch.device) -> LocalComputation:
    """A job's model, split as its reducer splits it, and its data; in this process. Raises SpecError: it cannot be
    split so.
    """
    staging = spec.staging
    plan = split(instance.task, staging, spec.plan)
    layout = plan.cut(instance.layout)
    held = range(staging.stages)

    def build(job: JobSpec) -> WholeReplica:
        stages = StageReplica(instance.task, instance.split, layout, job.plan, staging, plan, held, device)
        return WholeReplica(layout, StageParts(layout, plan, held), stages)

    return LocalComputation(replace(instance, layout=layout), device, build)
