"""Image classification as a task: images in, logits of classes out, cross-entropy and accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.tasks import classifiers
from computeshare.tasks.base import Batch, Better, SplitName, Task
from computeshare.tasks.images import models, prediction
from computeshare.tasks.images.datasets import definitions, splits
from computeshare.tasks.images.datasets.class_names import class_names
from computeshare.tasks.images.datasets.definitions import ImagesDefinition
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.images.transforms import Normaliser, Shape
from computeshare.tasks.own.files import OwnData
from computeshare.tasks.usage import Guess, Usage


@dataclass(frozen=True, slots=True)
class ImageClassification(Task):
    """A model of `tasks.images.models` on a data set of `tasks.images.datasets`.

    Batches are pairs of float32 images (n, channels, height, width) and int64 labels (n,).

    Args:
        shape: channels, height and width of the images that the model sees.
        label_smoothing: share of each label that the training loss spreads evenly over all classes.
        augment: names of the transformations of `augmentation` that training applies, in order.
        hub: of a data set of Hugging Face.
        own: the data set, where a user added it.
    """

    dataset: str
    model: str
    shape: Shape
    label_smoothing: float = 0.0
    augment: Sequence[str] = ()
    validation: float = 0.0
    hub: HubArgs | None = None
    own: OwnData | None = None

    @property
    def metrics(self) -> Mapping[str, Better]:
        return {"accuracy": "higher"}

    @property
    def classes(self) -> int:
        return self._definition.classes

    @property
    def _definition(self) -> ImagesDefinition:
        if self.own:
            return definitions.of_own(self.dataset, self.own.facts)
        return splits.definition_of(self.dataset, self.hub)

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"model": self.model, "shape": self.shape, "classes": self.classes}

    def module(self, seed: int) -> nn.Module:
        return models.build(self.model, self.shape, self.classes, seed)

    def prepare(self, data_dir: Path) -> None:
        if not self.own:
            splits.prepare(self.dataset, data_dir, self.shape, self.hub)

    def open(self, split: SplitName, data_dir: Path) -> ImageSplit:
        if self.own:
            return splits.open_own(self.dataset, self.own, split, self.shape, self.augment)
        return splits.open_split(self.dataset, split, data_dir, self.shape, self.augment, self.hub)

    def noise(self, samples: int, seed: int) -> ImageSplit:
        source = np.random.Generator(np.random.PCG64(seed))
        images = source.integers(0, 256, (samples, *self.shape), np.uint8)
        labels = source.integers(0, self.classes, samples, np.int64)
        channels = self.shape[0]
        normalise = Normaliser.build(self.shape, 255.0, (0.5,) * channels, (0.25,) * channels)
        return ImageSplit(images, labels, normalise, self.augment)

    @property
    def class_names(self) -> Sequence[str] | None:
        if self.own:
            return self.own.facts.classes
        return self.hub.facts.classes if self.hub and self.hub.facts else class_names(self.dataset)

    @property
    def usage(self) -> Usage:
        return prediction.usage_of(self._definition, self.class_names, self.model, self.shape)

    def guess(self, module: nn.Module, file: Path, most: int) -> list[Guess]:
        inputs = prediction.read(self._definition, self.shape, file)
        return prediction.guesses(self.class_names, module, inputs, most)

    def place(self, batch: Batch, device: torch.device) -> Batch:
        images, labels = batch
        return pixel_by_pixel(images) if device.type == "cpu" else images.to(device), labels.to(device)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return classifiers.loss(module, batch, self.label_smoothing)

    def sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return classifiers.sums(module, batch)


def pixel_by_pixel(images: Tensor) -> Tensor:
    """A copy of the images in channels-last memory order, which oneDNN's convolutions use.

    The strides are set explicitly: with one channel, torch cannot tell `channels_last` from the default order, and a
    small network becomes a fifth slower.
    """
    n, c, h, w = images.shape
    return torch.empty_strided((n, c, h, w), (c * h * w, 1, w * c, c), dtype=images.dtype).copy_(images)
