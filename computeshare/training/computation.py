"""A job's model and training data in this process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.modules import frozen_digest, weights_of
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout, Weights
from computeshare.training import devices, selftest
from computeshare.training.execution import execution_of
from computeshare.training.local_replica import LocalReplica
from computeshare.training.replica import Replica
from computeshare.training.work_units import AnyReplica, Compute, SelfTestResult, kind_with
from computeshare.types import Kind, Precision, Vector


def open_here(
    spec: JobSpec, device_name: str | None, data_dir: Path, bundles: BundleStore | None = None
) -> "LocalComputation":
    """Choose a device, build the job's model, and open its training split.

    Args:
        bundles: with the files of a data set that a user added.
    Raises: SettingsError: there is no such device; DatasetError; SpecError.
    """
    device = choose_device(spec, device_name)
    return LocalComputation(task_of(spec, bundles).instance(spec.seed, "train", data_dir), device)


def choose_device(spec: JobSpec, device_name: str | None) -> torch.device:
    """The device to compute the job on, made deterministic; sets this process's number of threads."""
    if spec.threads:
        torch.set_num_threads(spec.threads)
    device = devices.choose(device_name)
    devices.make_deterministic(device)
    return device


@dataclass(frozen=True)
class LocalComputation(devices.OnDevice):
    """A task's module and training data, in this process, with the device to compute on."""

    instance: TaskInstance
    torch_device: torch.device
    build: Callable[[JobSpec], AnyReplica] | None = None
    """Builds the replica; by default `replica_of`."""

    @property
    def layout(self) -> Layout:
        return self.instance.layout

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.instance.task.identity

    @cached_property
    def frozen(self) -> str:
        return frozen_digest(self.instance.module)

    @property
    def built(self) -> Weights:
        return weights_of(self.instance.module, self.instance.layout)

    def test(self) -> SelfTestResult:
        return selftest.run(self.instance, self.torch_device)

    def saved_bytes_in_bfloat16(self) -> int:
        return selftest.saved_bytes_in_bfloat16(self.instance)

    def trial(self, spec: JobSpec, precision: Precision) -> Compute:
        instance = self.instance
        copied = replace(instance, module=copy.deepcopy(instance.module))
        replica = replica_of(spec.model_copy(update={"precision": precision}), copied, self.torch_device)
        replica.load(weights_of(instance.module, instance.layout))

        def compute(micro_batches: Sequence[int]) -> tuple[Vector, Vector]:
            update = replica.walk(micro_batches)
            return update.vector, update.buffers

        return compute

    def replica(self, spec: JobSpec) -> AnyReplica:
        return self.build(spec) if self.build else replica_of(spec, self.instance, self.torch_device)

    def close(self) -> None:
        """Do nothing: what it holds ends with the process."""


def replica_of(spec: JobSpec, instance: TaskInstance, device: torch.device) -> Replica | LocalReplica:
    """Build the replica for this job's strategy; it takes over the module of `instance`."""
    strategy, execution = spec.strategy, execution_of(spec, device)
    if strategy.inner is None:
        return Replica(instance, spec.plan, device, strategy.sent, execution)
    return LocalReplica(instance, spec.plan, device, strategy.inner, strategy.keeps_inner, spec.inner_rules, execution)


def kind_of(device: torch.device, replica: AnyReplica) -> Kind:
    """The kind of this machine as it computes with the replica, as `kind_with`."""
    return kind_with(devices.kind(device), replica)
