"""Classification of arrays as a task: inputs of any shape, logits of classes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from computeshare.errors import DatasetError
from computeshare.jobspec.sampling_plan import Seeds
from computeshare.tasks import classifiers
from computeshare.tasks.base import Batch, Better, Indices, SplitName, Task
from computeshare.tasks.images import models
from computeshare.tasks.own.files import INPUTS, TARGETS, OwnData
from computeshare.tasks.usage import Usage


@dataclass(frozen=True, slots=True)
class ArraySplit:
    """Inputs (n, ...) and classes (n,) of a split; batches are normalised as (x - mean) / std."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]
    mean: float
    std: float

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> tuple[Tensor, Tensor]:
        """The samples with these indices (n,): float32 inputs (n, ...) and int64 classes (n,). Nothing is random."""
        inputs = torch.empty(len(indices), *self.inputs.shape[1:])
        inputs.numpy()[...] = self.inputs[indices]
        return inputs.sub_(self.mean).div_(self.std), torch.from_numpy(self.targets[indices].astype(np.int64))


@dataclass(frozen=True, slots=True)
class ArrayClassification(Task):
    """A classifier that takes inputs of any shape, on arrays that a user added.

    Args:
        label_smoothing, validation: as of `ImageClassification`.
    """

    data: OwnData
    model: str
    label_smoothing: float = 0.0
    validation: float = 0.0

    @property
    def metrics(self) -> Mapping[str, Better]:
        return {"accuracy": "higher"}

    @property
    def classes(self) -> int:
        return len(self.data.facts.classes)

    @property
    def class_names(self) -> Sequence[str]:
        return self.data.facts.classes

    @property
    def name(self) -> str:
        return self.model

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.facts.shape

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"model": self.model, "shape": self.shape, "classes": self.classes}

    @property
    def usage(self) -> Usage:
        (mean,), (std,) = self.data.facts.mean, self.data.facts.std
        inputs = (
            f"Inputs are float32 arrays of shape (n, {', '.join(map(str, self.shape))}): values minus {mean:g}, "
            f"divided by {std:g}. Outputs are logits of shape (n, {self.classes})."
        )
        build = models.construction(self.model, self.shape, self.classes)
        return Usage("tabular-classification", inputs, build, is_plain=True)

    def module(self, seed: int) -> nn.Module:
        return models.build(self.model, self.shape, self.classes, seed)

    def prepare(self, data_dir: Path) -> None:
        """Do nothing: the files were prepared when they were added."""

    def open(self, split: SplitName, data_dir: Path) -> ArraySplit:
        del data_dir
        inputs, targets = (self.data.array(split, name) for name in (INPUTS, TARGETS))
        self.data.check(split, inputs, targets)
        inputs = inputs.reshape(len(inputs), *(inputs.shape[1:] or (1,)))
        if inputs.shape[1:] != self.shape or targets.min() < 0 or targets.max() >= self.classes:
            raise DatasetError(f"the {split} split is not as the job's data set: add the data set again")
        return ArraySplit(inputs, targets, self.data.facts.mean[0], self.data.facts.std[0])

    def noise(self, samples: int, seed: int) -> ArraySplit:
        source = np.random.Generator(np.random.PCG64(seed))
        inputs = source.standard_normal((samples, *self.shape), np.float32)
        return ArraySplit(inputs, source.integers(0, self.classes, samples, np.int64), 0.0, 1.0)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return classifiers.loss(module, batch, self.label_smoothing)

    def sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return classifiers.sums(module, batch)
