"""Loss and metrics of weights on a split."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from computeshare.runtime.processes import using_threads
from computeshare.tasks import class_counts
from computeshare.tasks.base import CLASSES, PREDICTED, TaskInstance
from computeshare.tasks.class_counts import ClassCounts
from computeshare.tasks.modules import load_weights
from computeshare.tensors.layout import Weights


@dataclass(frozen=True, slots=True)
class SplitScore:
    """The mean loss and the mean of each metric of the task, over `samples` samples; a classifier's counts by class."""

    loss: float
    metrics: Mapping[str, float]
    samples: int
    classes: ClassCounts | None = None


def score(instance: TaskInstance, weights: Weights, batch: int = 0) -> SplitScore:
    """Load `weights` into the module and score them on the whole split, on the module's device, in the split's order.

    A CPU computes with one thread, so that its number of cores changes no bit of a score.

    Args:
        batch: samples at once; 0: as the task says.
    Raises: ShapeError: the weights do not fit the module.
    """
    task, module, count = instance.task, instance.module, len(instance.split)
    batch = batch or task.scored_at_once
    load_weights(module, instance.layout, weights)
    device = next(module.parameters()).device
    totals = dict.fromkeys(("loss", *task.metrics), 0.0)
    answers: dict[str, list[Tensor]] = {CLASSES: [], PREDICTED: []}
    module.eval()
    with torch.inference_mode(), using_threads(1):
        for start in range(0, count, batch):
            indices = np.arange(start, min(start + batch, count))
            sums = task.sums(module, task.place(instance.split.batch(indices), device))
            for name in sums.keys() & answers.keys():
                answers[name].append(sums.pop(name).cpu())
            for name, value in sums.items():
                totals[name] += value.item()
    means = {name: total / count for name, total in totals.items()}
    classes = None
    if all(answers.values()):
        by_sample = {name: torch.cat(found).numpy() for name, found in answers.items()}
        classes = class_counts.count_classes(by_sample[CLASSES], by_sample[PREDICTED], task.classes, task.class_names)
    return SplitScore(means.pop("loss"), means, count, classes)
