"""Opens a job on a worker that is to hold some of its model's stages: the data, and the split, but no weights."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.pipeline.chains.stage_trial import ModelStages
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.recipes.process import StageProcess
from computeshare.pipeline.stage_replica import HeldStages
from computeshare.protocol.round_store import RoundStore
from computeshare.settings import Settings
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout
from computeshare.training.computation import choose_device
from computeshare.training.devices import OnDevice
from computeshare.training.work_units import MemoryMeter, SelfTestResult
from computeshare.types import Kind

ASK_AGAIN_S = 0.5


class StageSetup(Protocol):
    """All that a worker has of a job before it holds stages."""

    @property
    def spec(self) -> JobSpec: ...

    @property
    def layout(self) -> Layout:
        """With the cuts of `stages`."""

    @property
    def stages(self) -> StagePlan: ...

    @property
    def device(self) -> str:
        """The device in words."""

    @property
    def kind(self) -> Kind:
        """The machine's kind."""

    @property
    def memory(self) -> MemoryMeter:
        """The memory that stages are held in."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """As `Task.identity`."""

    def test(self, room_bytes: int) -> SelfTestResult:
        """As `ModelStages.test`, while no stages are held."""

    def hold(self, parts: StageParts) -> HeldStages:
        """Hold a run of stages, without weights yet; those held before must have been given up."""

    def rate(self, stage: int, goes_on: Callable[[], bool]) -> float:
        """As `ModelStages.rate`, while no stages are held."""


@dataclass(frozen=True)
class ModelSetup(OnDevice):
    """A model that computes in the seat's process."""

    spec: JobSpec
    model: ModelStages
    torch_device: torch.device

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def stages(self) -> StagePlan:
        return self.model.stages

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.model.task.identity

    def test(self, room_bytes: int) -> SelfTestResult:
        return self.model.test(room_bytes)

    def hold(self, parts: StageParts) -> HeldStages:
        return self.model.replica(parts.held)

    def rate(self, stage: int, goes_on: Callable[[], bool]) -> float:
        return self.model.rate(stage, goes_on)


@dataclass(frozen=True)
class RecipeSetup:
    """A recipe's model, whose stages compute in a confined process."""

    spec: JobSpec
    layout: Layout
    stages: StagePlan
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

    def rate(self, stage: int, goes_on: Callable[[], bool]) -> float:
        return self.process.rate(self.stages, stage, goes_on)


def open_stages(spec: JobSpec, device_name: str | None, settings: Settings, stages: StagePlan) -> ModelSetup:
    """Open the job's training data and choose a device. Raises SettingsError, DatasetError, SpecError."""
    device = choose_device(spec, device_name)
    task = task_of(spec, BundleStore(settings.bundles_dir))
    samples = task.samples("train", settings.data_dir)
    about = stages.cut(task.layout()), spec.plan, spec.staging, stages
    return ModelSetup(spec, ModelStages(task, samples, *about, device), device)


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
