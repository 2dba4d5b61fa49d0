"""Opens a job on a worker that is to hold some of its model's stages: the data, and the split, but no weights."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.protocol.round_store import RoundStore
from computeshare.settings import Settings
from computeshare.strategies.base import Staging
from computeshare.tasks.base import Split, Task
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout
from computeshare.training.computation import choose_device
from computeshare.training.devices import OnDevice

ASK_AGAIN_S = 0.5


@dataclass(frozen=True)
class StageSetup(OnDevice):
    """All that a worker has of a job before it holds stages; `layout` has the cuts of `stages`."""

    spec: JobSpec
    task: Task
    samples: Split
    layout: Layout
    stages: StagePlan
    torch_device: torch.device

    @property
    def staging(self) -> Staging:
        """How the job's strategy splits the model."""
        staging = self.spec.strategy.staging
        assert staging, "the job's strategy splits the model"
        return staging

    def replica(self, parts: StageParts) -> StageReplica:
        """The replica of a run of stages, without weights yet."""
        about = self.task, self.samples, self.layout, self.spec.plan, self.staging, self.stages
        return StageReplica(*about, parts.held, self.torch_device)


def open_stages(spec: JobSpec, device_name: str | None, settings: Settings, stages: StagePlan) -> StageSetup:
    """Open the job's training data and choose a device. Raises SettingsError, DatasetError, SpecError."""
    device = choose_device(spec, device_name)
    task = task_of(spec, BundleStore(settings.bundles_dir))
    layout = task.layout()
    cut = replace(layout, cuts=stages.cuts_of(layout))
    return StageSetup(spec, task, task.samples("train", settings.data_dir), cut, stages, device)


def await_stages(rounds: RoundStore, stop: threading.Event) -> StagePlan | None:
    """Where the model is split, once the reducer has decided; None: the seat is to leave, or the job is gone."""
    while not stop.is_set():
        text: Any = rounds.stages()
        if text:
            return StagePlan.parse(text)
        if rounds.spec() is None:
            return None
        stop.wait(ASK_AGAIN_S)
    return None
