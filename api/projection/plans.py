"""The division of a stored job's samples."""

from typing import Any

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.registry import stored


def plan_of(spec: dict[str, Any]) -> Plan:
    """From its specification's document; a job stays readable when the catalog no longer knows its model."""
    samples = catalog().datasets[spec["dataset"]].train
    return Plan(spec["seed"], samples, spec["micro_batch"], spec["micro_batches_per_round"], stored(spec).steps)


def mean_round(spec: dict[str, Any]) -> float:
    """Samples of a round, on average: the last one of an epoch may be short."""
    plan = plan_of(spec)
    return plan.samples / plan.rounds_per_epoch
