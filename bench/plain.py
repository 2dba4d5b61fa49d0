"""The plain single-process training loop for comparison: same data, order and batches, but no ComputeShare."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks import modules
from computeshare.tasks.images import datasets, models
from computeshare.tasks.metrics import score


@dataclass(frozen=True, slots=True)
class Plain:
    """The loop's result: final parameters (d,), and test accuracy (a fraction)."""

    parameters: np.ndarray
    accuracy: float


def train(spec: JobSpec, data_dir: Path) -> Plain:
    """Run a job's rounds as one batch each, with torch alone."""
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    module = models.of(spec)
    layout = modules.layout_of(module)
    split = datasets.open_split(spec.dataset, "train", data_dir, spec.shape)
    optimizer = getattr(torch.optim, spec.optimizer.name)(module.parameters(), **spec.optimizer.arguments)
    module.train()
    for version in range(spec.rounds_total):
        following = spec.plan.round(version)
        numbers = range(following.first, following.first + following.count)
        images, labels = split.batch(np.concatenate([spec.plan.indices(m) for m in numbers]))
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = modules.weights_of(module, layout)
    test = datasets.open_split(spec.dataset, "test", data_dir, spec.shape)
    return Plain(weights.parameters, score(module, layout, weights, test).accuracy)
