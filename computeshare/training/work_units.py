"""What computes a job's units, as its strategy has it: micro-batches one by one, or replicas of local SGD."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.images.datasets import Split
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.local_replica import LocalReplica
from computeshare.training.replica import Replica, Take, Update
from computeshare.types import Blob, Vector


class InnerState(Protocol):
    """What goes on from unit to unit, and from a worker that leaves to another: as in `LocalReplica`."""

    def dump(self) -> list[Blob] | None: ...
    def restore(self, state: Blob) -> None: ...


class AnyReplica(Protocol):
    """The model with which a machine takes part in a job: `load` a version's weights, then `compute` units."""

    @property
    def room(self) -> Vector | None:
        """As `Replica.room`."""

    @property
    def kept(self) -> InnerState | None:
        """The inner state, where the strategy keeps it."""

    def load(self, weights: Weights) -> None: ...

    def prefetch(self, micro_batches: Iterable[int]) -> None: ...

    def compute(
        self,
        unit: int,
        goes_on: Callable[[], bool] = ...,
        sizes: Sequence[int] = (),
        take: Take | None = None,
    ) -> Update:
        """What the unit with this number yields, in a round of these `sizes`, if it has any. Raises Interrupted.

        Args:
            take: is given the buckets of the update as they become ready; the result need not have them then.
        """

    def walk(self, micro_batches: Sequence[int]) -> Update:
        """What some micro-batches end with, at least one: the last one's update, or where their steps led."""


def replica_of(spec: JobSpec, module: nn.Module, layout: Layout, split: Split, device: torch.device) -> AnyReplica:
    """What computes this job's units; it takes `module` over."""
    strategy = spec.strategy
    if strategy.inner is None:
        return Replica(module, layout, spec.plan, split, device, strategy.sent)
    return LocalReplica(module, layout, spec.plan, split, device, strategy.inner, strategy.keeps_inner)
