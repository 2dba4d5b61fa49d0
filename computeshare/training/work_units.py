"""The replica that computes a job's units: a gradient per micro-batch, or steps of local SGD, by the strategy."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import TaskInstance
from computeshare.tensors.layout import Weights
from computeshare.training import devices
from computeshare.training.compilation import Compilation
from computeshare.training.execution import execution_of
from computeshare.training.local_replica import LocalReplica
from computeshare.training.replica import Replica, Take, Update
from computeshare.types import Blob, Kind, Vector


class InnerState(Protocol):
    """The inner optimizer's state, kept from unit to unit and handed over by workers that leave; see `LocalReplica`."""

    def dump(self) -> list[Blob] | None: ...
    def restore(self, state: Blob) -> None: ...


class AnyReplica(Protocol):
    """The model with which a machine takes part in a job: `load` a version's weights, then `compute` units."""

    @property
    def room(self) -> Vector | None:
        """As `Replica.room`."""

    @property
    def kept(self) -> InnerState | None:
        """The inner state, if the strategy keeps it."""

    @property
    def compilation(self) -> Compilation:
        """By what the module is compiled."""

    def load(self, weights: Weights) -> None: ...

    def prefetch(self, micro_batches: Iterable[int]) -> None: ...

    def compute(self, unit: int, goes_on: Callable[[], bool] = ..., take: Take | None = None) -> Update:
        """Compute the unit with this number. Raises Interrupted.

        Args:
            take: is given the buckets of the update as they become ready; the result need not have them then.
        """

    def walk(self, micro_batches: Sequence[int]) -> Update:
        """Compute at least one micro-batch: returns the last gradient, or the pseudo-gradient of all steps."""


def replica_of(spec: JobSpec, instance: TaskInstance, device: torch.device) -> AnyReplica:
    """Build the replica for this job's strategy; it takes over the module of `instance`."""
    strategy, execution = spec.strategy, execution_of(spec, device)
    if strategy.inner is None:
        return Replica(instance, spec.plan, device, strategy.sent, execution)
    return LocalReplica(instance, spec.plan, device, strategy.inner, strategy.keeps_inner, spec.inner_rules, execution)


def kind_of(device: torch.device, replica: AnyReplica) -> Kind:
    """The kind of this machine as it computes with the replica: as `devices.kind`, and the compiler if one is used."""
    compiler = replica.compilation.compiler
    return devices.kind(device) | ({"compiler": compiler} if compiler else {})
