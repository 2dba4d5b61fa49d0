"""The plain single-process training loop for comparison: same data, order and batches, but no ComputeShare."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of


@dataclass(frozen=True, slots=True)
class Plain:
    """The loop's result: final parameters (d,), and test accuracy (a fraction)."""

    parameters: np.ndarray
    accuracy: float


def train(spec: JobSpec, data_dir: Path) -> Plain:
    """Run a job's rounds as one batch each, with torch alone."""
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    task = task_of(spec)
    instance = task.instance(spec.seed, "train", data_dir)
    module, split = instance.module, instance.split
    optimizer = getattr(torch.optim, spec.optimizer.name)(module.parameters(), **spec.optimizer.arguments)
    module.train()
    for version in range(spec.rounds_total):
        following = spec.plan.round(version)
        numbers = range(following.first, following.first + following.count)
        images, labels = split.batch(np.concatenate([spec.plan.indices(m) for m in numbers]))
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = weights_of(module, instance.layout)
    judge = task.instance(spec.seed, "test", data_dir)
    return Plain(weights.parameters, score(judge, weights).metrics["accuracy"])
