"""What computes a job's units, by its strategy: micro-batches one by one, or replicas of local SGD."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.strategy_fields import LocalStrategy
from computeshare.tasks.datasets import Split
from computeshare.tensors.layout import Layout
from computeshare.training.local_replica import LocalReplica, LocalUpdate
from computeshare.training.replica import Replica, Take, Update


def replica_of(
    spec: JobSpec, module: nn.Module, layout: Layout, split: Split, device: torch.device
) -> Replica | LocalReplica:
    """The model with which a machine takes part in a job: `load` a version's weights, then `compute` units."""
    strategy = spec.strategy
    if isinstance(strategy, LocalStrategy):
        kept = strategy.inner_state == "kept"
        return LocalReplica(module, layout, spec.plan, split, device, strategy.inner_optimizer, kept)
    return Replica(module, layout, spec.plan, split, device)


def compute(
    replica: Replica | LocalReplica,
    unit: int,
    sizes: Sequence[int] = (),
    goes_on: Callable[[], bool] = lambda: True,
    take: Take | None = None,
) -> Update | LocalUpdate:
    """What the unit with this number yields, in a round of these `sizes`, if it has any. Raises Interrupted.

    Args:
        take: is given the buckets of the update as they become ready; the result need not have them then.
    """
    if isinstance(replica, LocalReplica):
        return replica.compute(unit, goes_on, sizes, take)
    return replica.compute(unit, goes_on, take)


def try_out(replica: Replica | LocalReplica, micro_batches: Sequence[int]) -> Update | LocalUpdate:
    """What some micro-batches end with, at least one: the last one's update, or where their steps led."""
    if isinstance(replica, LocalReplica):
        return replica.walk(micro_batches)
    for micro_batch in micro_batches[:-1]:
        replica.compute(micro_batch)
    return replica.compute(micro_batches[-1])
