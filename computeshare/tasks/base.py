"""A task: what the training system knows of a model and its data. Everything outside this room works on these methods,
on layouts and on flat vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from computeshare.errors import SpecError
from computeshare.jobspec.sampling_plan import Seeds, parted
from computeshare.tasks import modules
from computeshare.tasks.usage import Guess, Usage
from computeshare.tensors.layout import Layout

SplitName = Literal["train", "test"]
Part = Literal["train", "validation", "test"]
"""A split, where some samples of `train` may be held out as `validation`."""
Better = Literal["higher", "lower"]
Batch = Any
"""A tensor, or a tuple, list or dict of batches; each tensor has one entry per sample in its first dimension."""
Indices = npt.NDArray[np.int64]
CLASSES, PREDICTED = "classes", "predicted"


class Split(Protocol):
    """A part of a data set."""

    def __len__(self) -> int:
        """The number of samples."""

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> Batch:
        """The samples with these indices (n,), on the CPU.

        Args:
            seeds: of each sample's random transformations for training (n,); None: there are none.
        """


@dataclass(frozen=True, slots=True)
class Subset:
    """The samples of a split with these indices (n,), numbered anew."""

    whole: Split
    indices: Indices

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> Batch:
        return self.whole.batch(self.indices[indices], seeds)


class Task(ABC):
    """A model, its data, its loss and its metrics."""

    validation: float = 0.0
    """The fraction of the training samples that is held out to validate."""

    @property
    @abstractmethod
    def metrics(self) -> Mapping[str, Better]:
        """Every metric beside the loss, with the direction that is better."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's name, for messages."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """All that the module and the form of its batches depend on, as JSON."""

    @property
    def scored_at_once(self) -> int:
        """The samples of a batch to score."""
        return 256

    @abstractmethod
    def module(self, seed: int) -> nn.Module:
        """The model on the CPU, initialised from `seed` (0 to 2**63 - 1); torch's global generators stay as they were.

        Raises: SpecError: it cannot be built.
        """

    @abstractmethod
    def prepare(self, data_dir: Path) -> None:
        """Make sure that the data set's files exist, and download missing files. Raises DatasetError."""

    @abstractmethod
    def open(self, split: SplitName, data_dir: Path) -> Split:
        """Open a split whose files exist. Raises DatasetError."""

    @abstractmethod
    def noise(self, samples: int, seed: int) -> Split:
        """Random samples in the form of the data set's, the same for everybody."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean training loss over the samples of a batch, a number on the module's device."""

    @property
    def classes(self) -> int:
        """The number of a classifier's classes; 0: it is no classifier."""
        return 0

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of a classifier's classes in the order of their numbers, where they are known."""
        return None

    @abstractmethod
    def sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The sums over a batch's samples of `loss` and of every metric, each a number on the module's device.

        A classifier adds `CLASSES` (n,), each sample's true class, and `PREDICTED` (n,), the class that it was given.
        """

    @property
    def usage(self) -> Usage:
        """How the trained module is used."""
        return Usage("other", "")

    def guess(self, module: nn.Module, file: Path, most: int) -> list[Guess]:
        """The `most` likely classes of what is in a file, the likeliest first; the module is in eval mode.

        Raises: InputError: the file cannot be read. SpecError: the model does not classify files.
        """
        raise SpecError(f"{self.name} does not classify files: choose a job that trains a classifier of images")

    def generate(self, module: nn.Module, prompt: str, temperature: float, seed: int) -> Iterator[str]:
        """Yield the text that follows a prompt, character by character and without end; the module is in eval mode.

        Args:
            temperature: 0: always the likeliest; 1: as the model says; above 1: more surprising.
            seed: of the draws.
        Raises: InputError: the model knows none of the prompt's characters. SpecError: it does not generate text.
        """
        raise SpecError(f"{self.name} does not generate text: choose a job that trains a language model")

    def sample(self, module: nn.Module, seed: int) -> str | None:
        """A short text that shows what a version has learnt, from the same prompt with the same draws for all; None:
        the model does not generate text. The module is in eval mode.
        """
        return None

    def place(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on a device, in the order in memory that the model computes with fastest."""
        return moved(batch, device)

    def layout(self) -> Layout:
        """The layout of the module, without allocating its weights. Raises SpecError, as `module`."""
        return modules.layout_of(self.outline())

    def outline(self) -> nn.Module:
        """The module without its weights. Raises SpecError, as `module`."""
        with modules.ParametersOnMeta(), torch.no_grad():
            return self.module(0)

    def instance(self, seed: int, part: Part, data_dir: Path) -> "TaskInstance":
        """The module built and a part of the data opened, as `samples`. Raises SpecError, DatasetError."""
        return self._with(seed, self.samples(part, data_dir))

    def samples(self, part: Part, data_dir: Path) -> Split:
        """A part of the data, downloaded before if need be. Raises DatasetError."""
        self.prepare(data_dir)
        split = self.open("test" if part == "test" else "train", data_dir)
        if part == "validation" or (part == "train" and self.validation):
            training, validating = parted(len(split), self.validation)
            split = Subset(split, training if part == "train" else validating)
        return split

    def on_noise(self, samples: int, seed: int = 0) -> "TaskInstance":
        """The module built, with random samples instead of the data set's. Raises SpecError."""
        return self._with(seed, self.noise(samples, seed))

    def _with(self, seed: int, split: Split) -> "TaskInstance":
        module = self.module(seed)
        return TaskInstance(self, module, modules.layout_of(module), split)


@dataclass(frozen=True, slots=True)
class TaskInstance:
    """A task with its module built, and the split that the module is to be trained or scored on."""

    task: Task
    module: nn.Module
    layout: Layout
    split: Split


def moved(batch: Batch, device: torch.device) -> Batch:
    """A batch with all its tensors on `device`, aligned."""
    return changed(batch, lambda tensor: modules.aligned(tensor.to(device)))


def channels_last(batch: Batch) -> Batch:
    """A batch with its tensors of four dimensions in the order of `torch.channels_last`."""
    return changed(batch, lambda one: one.contiguous(memory_format=torch.channels_last) if one.ndim == 4 else one)


def changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch with each of its tensors replaced."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: changed(part, change) for name, part in batch.items()}
    return type(batch)(changed(part, change) for part in batch)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors(part)
