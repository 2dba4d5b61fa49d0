"""Opens a job on a worker that is to hold some of its model's stages: the data, and the split, but no weights."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from computeshare.bundles.store import BundleStore
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.chains.stage_trial import StageTest, TrialMail, measured_rate
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.recipes.process import StageProcess
from computeshare.pipeline.stage_replica import HeldStages, StageReplica
from computeshare.protocol.round_store import RoundStore
from computeshare.settings import Settings
from computeshare.strategies.base import Staging
from computeshare.tasks.base import Split, Task
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout
from computeshare.training.computation import choose_device
from computeshare.training.devices import OnDevice
from computeshare.training.work_units import MemoryMeter, SelfTestResult
from computeshare.types import Kind

ASK_AGAIN_S = 0.5


@dataclass(frozen=True)
class StageSetup(ABC):
    """All that a worker has of a job before it holds stages; `layout` has the cuts of `stages`."""

    spec: JobSpec
    layout: Layout
    stages: StagePlan

    @property
    def staging(self) -> Staging:
        """How the job's strategy splits the model."""
        staging = self.spec.strategy.staging
        assert staging, "the job's strategy splits the model"
        return staging

    @property
    @abstractmethod
    def device(self) -> str:
        """The device in words."""

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """The machine's kind."""

    @property
    @abstractmethod
    def memory(self) -> MemoryMeter:
        """The memory that stages are held in."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """As `Task.identity`."""

    @abstractmethod
    def test(self, room_bytes: int) -> SelfTestResult:
        """As `StageTest.run`, while no stages are held."""

    @abstractmethod
    def hold(self, parts: StageParts) -> HeldStages:
        """Hold a run of stages, without weights yet; those held before must have been given up."""

    @abstractmethod
    def rate(self, stage: int, needed: Sequence[StageDemand], goes_on: Callable[[], bool]) -> float:
        """As `measured_rate`, while no stages are held."""


@dataclass(frozen=True)
class ModelStages(OnDevice, StageSetup):
    """A model that computes in the seat's process."""

    task: Task
    samples: Split
    torch_device: torch.device

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.task.identity

    def test(self, room_bytes: int) -> SelfTestResult:
        about = self.task, self.samples, self.layout, self.spec.plan, self.staging, self.stages
        return StageTest(*about).run(self.torch_device, room_bytes)

    def hold(self, parts: StageParts) -> StageReplica:
        about = self.task, self.samples, self.layout, self.spec.plan, self.staging, self.stages
        return StageReplica(*about, parts.held, self.torch_device)

    def rate(self, stage: int, needed: Sequence[StageDemand], goes_on: Callable[[], bool]) -> float:
        replica = self.hold(StageParts(self.layout, self.stages, range(stage, stage + 1)))
        mail = TrialMail(replica, self.stages, self.spec.plan, CODECS[self.staging.activations])
        return measured_rate(replica, self.layout, mail, needed, goes_on)


@dataclass(frozen=True)
class RecipeModelStages(StageSetup):
    """A recipe's model, whose stages compute in a confined process."""

    process: StageProcess

    @property
    def device(self) -> str:
        return self.process.device

    @property
    def kind(self) -> Kind:
        return self.process.kind

    @property
    def memory(self) -> MemoryMeter:
        return self.process.memory

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.process.identity

    def test(self, room_bytes: int) -> SelfTestResult:
        return self.process.test_stages(self.stages, room_bytes)

    def hold(self, parts: StageParts) -> HeldStages:
        return self.process.hold(parts)

    def rate(self, stage: int, needed: Sequence[StageDemand], goes_on: Callable[[], bool]) -> float:
        del needed  # the process finds them itself
        return self.process.rate(self.stages, stage, goes_on)


def open_stages(spec: JobSpec, device_name: str | None, settings: Settings, stages: StagePlan) -> ModelStages:
    """Open the job's training data and choose a device. Raises SettingsError, DatasetError, SpecError."""
    device = choose_device(spec, device_name)
    task = task_of(spec, BundleStore(settings.bundles_dir))
    samples = task.samples("train", settings.data_dir)
    return ModelStages(spec, cut(task.layout(), stages), stages, task, samples, device)


def cut(layout: Layout, stages: StagePlan) -> Layout:
    """The layout with the cuts of a plan."""
    return replace(layout, cuts=stages.cuts_of(layout))


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
