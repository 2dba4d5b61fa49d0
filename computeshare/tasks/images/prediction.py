"""A trained classifier of images: what its inputs are, how it is built, and what it says of a file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from computeshare.tasks.images import files, models
from computeshare.tasks.images.datasets import splits
from computeshare.tasks.images.datasets.definitions import ImagesDefinition
from computeshare.tasks.images.transforms import Normaliser, Shape
from computeshare.tasks.usage import Guess, Usage

MOST_NAMES = 100
"""The most classes that are listed in a sentence."""


def usage_of(definition: ImagesDefinition, names: Sequence[str] | None, model: str, shape: Shape) -> Usage:
    """How a classifier is used that was trained on a data set whose classes have these names (None: none)."""
    classes = definition.classes
    normalise = Normaliser.build(shape, 255.0, definition.mean, definition.std)
    mean, std = (", ".join(f"{x:.4f}" for x in values.flatten().tolist()) for values in (normalise.mean, normalise.std))
    inputs = (
        f"Inputs are float32 images of shape (n, {', '.join(map(str, shape))}): values from 0 to 1, minus the mean "
        f"({mean}), divided by the standard deviation ({std}), by channel. Outputs are logits of shape (n, {classes})"
        + (f", for the classes {', '.join(names)}." if names and len(names) <= MOST_NAMES else ".")
    )
    return Usage("image-classification", inputs, models.construction(model, shape, classes), is_plain=True)


def read(definition: ImagesDefinition, shape: Shape, path: Path) -> Tensor:
    """An image file as a batch of one (1, *shape), prepared as the data set's images are. Raises InputError."""
    pixels = files.read(path, splits.stored_shape(definition, shape))
    return Normaliser.build(shape, 255.0, definition.mean, definition.std)(pixels[None])


def guesses(names: Sequence[str] | None, module: nn.Module, inputs: Tensor, most: int) -> list[Guess]:
    """The `most` likely classes of a batch of one, the likeliest first."""
    with torch.inference_mode():
        probabilities = module(inputs)[0].softmax(dim=0)
    best = probabilities.topk(min(most, len(probabilities)))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Guess(index, names[index] if names else None, value) for index, value in found]
