"""Split models whose stages run in threads, and exchange messages in memory."""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from computeshare.errors import Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.splitter import split
from computeshare.pipeline.stage_replica import Mailbox, StageReplica, StageUpdate
from computeshare.tasks.base import Task, TaskInstance
from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.modules import drawn_from, layout_of, weights_of
from computeshare.tasks.text.language_model import LanguageModel
from computeshare.tensors.layout import Layout
from computeshare.training.replica import Replica
from computeshare.training.work_units import Update
from computeshare.types import Blob, Vector

CPU = torch.device("cpu")
WAIT_S = 60


@dataclass(frozen=True)
class Cut:
    """As a job's strategy says how to split its model."""

    stages: int = 2
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    recompute: bool = False
    activations: str = "float32"
    split: Sequence[str] = ()


@dataclass
class MemoryMail:
    """A `Mailbox` for several threads; `log` has all messages, by stage and tag."""

    log: dict[tuple[int, str], Blob] = field(default_factory=dict)
    is_over: bool = False
    _waiting: dict[tuple[int, str], Blob] = field(default_factory=dict)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def send(self, stage: int, tag: str, message: Blob) -> None:
        with self._news:
            assert (stage, tag) not in self.log, f"{tag} was sent to stage {stage} twice"
            self.log[stage, tag] = self._waiting[stage, tag] = message
            self._news.notify_all()

    def receive(self, stage: int, tag: str) -> Blob:
        with self._news:
            assert self._news.wait_for(lambda: self.is_over or (stage, tag) in self._waiting, WAIT_S), (stage, tag)
            if self.is_over:
                raise Interrupted("the work was called off")
            return self._waiting.pop((stage, tag))

    def end(self) -> None:
        with self._news:
            self.is_over = True
            self._news.notify_all()


@dataclass(frozen=True)
class Result:
    """A unit's result over all stages together."""

    vector: Vector
    buffers: Vector
    loss: float
    updates: list[StageUpdate]
    mail: MemoryMail

    @property
    def bits(self) -> tuple[bytes, bytes, float]:
        return self.vector.tobytes(), self.buffers.tobytes(), self.loss


@dataclass(frozen=True)
class SplitModel:
    """A task's model, split as `staging` says."""

    task: Task
    plan: Plan
    staging: Cut
    stage_plan: StagePlan
    layout: Layout

    @classmethod
    def of(cls, task: Task, plan: Plan, staging: Cut) -> "SplitModel":
        stage_plan, layout = split(task, staging, plan), task.layout()
        return cls(task, plan, staging, stage_plan, stage_plan.cut(layout))

    def replica(self, held: range) -> StageReplica:
        samples = self.task.noise(self.plan.samples, 0)
        made = StageReplica(self.task, samples, self.layout, self.plan, self.staging, self.stage_plan, held, CPU)
        views = self.layout.views(weights_of(self.task.module(self.plan.seed), self.layout))
        made.load({name: views[name] for name in made.names})
        return made

    def replicas(self, *counts: int) -> list[StageReplica]:
        """Of workers that hold so many stages each; without counts, one each."""
        ends = np.cumsum([0, *(counts or [1] * self.staging.stages)]).tolist()
        return [self.replica(range(start, stop)) for start, stop in itertools.pairwise(ends)]

    def compute(
        self, unit: int, *counts: int, replicas: Sequence[StageReplica] = (), mailboxes: Sequence[Mailbox] = ()
    ) -> Result:
        """Compute a unit, each worker in a thread of its own.

        Args:
            replicas: the workers; without them, new ones are made.
            mailboxes: of each worker; without them, messages are exchanged in memory.
        """
        mail = MemoryMail()
        workers = [*replicas] or self.replicas(*counts)
        vector = np.full(self.layout.parameters, np.nan, np.float32)
        taken: list[int] = []
        updates: list[StageUpdate] = []
        errors: list[BaseException] = []

        def take(bucket: int, values: Vector) -> None:
            taken.append(bucket)
            vector[self.layout.buckets[bucket]] = values

        def work(worker: StageReplica, mailbox: Mailbox) -> None:
            try:
                updates.extend(worker.compute(unit, mailbox, take=take))
            except BaseException as error:
                errors.append(error)
                mail.end()

        boxes = mailboxes or [mail] * len(workers)
        threads = [threading.Thread(target=work, args=about) for about in zip(workers, boxes, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert sorted(taken) == [*range(len(self.layout.buckets))]
        updates.sort(key=lambda one: one.stage)
        found = {name: values for one in updates for name, values in one.buffers.items()}
        buffers = [found[one.name] for one in self.layout.tensors if one.kind == "buffer"]
        loss = updates[-1].loss
        assert loss is not None
        return Result(vector, np.concatenate(buffers or [np.empty(0, np.float32)]), loss, updates, mail)

    def whole(self, unit: int) -> Update:
        """The unit's update on one worker, without stages."""
        return whole(self.task, self.plan, unit)


def whole(task: Task, plan: Plan, unit: int) -> Update:
    module = task.module(plan.seed)
    instance = TaskInstance(task, module, layout_of(module), task.noise(plan.samples, 0))
    return Replica(instance, plan, CPU).compute(unit)


def task_with(build: Callable[[], nn.Module], shape: tuple[int, int, int] = (1, 8, 8)) -> Task:
    """A classifier of random images into ten classes, by any module."""

    class Custom(ImageClassification):
        def module(self, seed: int) -> nn.Module:
            with drawn_from(seed):
                return build()

    return Custom("digits", "mlp", shape)


def gpt(layers: int = 4, dropout: float = 0.0, width: int = 16, block: int = 8) -> Task:
    args = GptArgs(n_layer=layers, n_head=2, n_embd=width, block_size=block, dropout=dropout)
    return LanguageModel("tinyshakespeare", args)
