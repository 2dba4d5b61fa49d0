"""Raw images to a model's input, a whole batch at a time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Shape = tuple[int, int, int]
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Divides raw values by `scale`, fits the images to `shape`, then computes (x - mean) / std by channel.

    `mean` and `std` are float32 of shape (channels, 1, 1), in units of the scaled values.
    """

    shape: Shape
    scale: float
    mean: Tensor
    std: Tensor

    @classmethod
    def build(cls, shape: Shape, scale: float, mean: tuple[float, ...], std: tuple[float, ...]) -> "Normaliser":
        """Use a data set's `mean` and `std`, converted to the channels of `shape` like its images."""
        constants = (fit(torch.tensor(values).reshape(1, -1, 1, 1), (shape[0], 1, 1))[0] for values in (mean, std))
        return cls(shape, scale, *constants)

    def __call__(self, raw: npt.NDArray[np.uint8]) -> Tensor:
        """Raw images (n, c, h, w) to normalised float32 images (n, *shape)."""
        images = torch.from_numpy(raw).to(torch.float32).div_(self.scale)
        if images.shape[1:] != self.shape:
            images = fit(images, self.shape)
        return images.sub_(self.mean).div_(self.std)


def fit(images: Tensor, shape: Shape) -> Tensor:
    """Convert images (n, c, h, w) to another number of channels (1 or 3) and another size, deterministically.

    Grey becomes colour by repetition, colour becomes grey by its luma. Images are padded with zeros if each side stays
    the same or grows by less than a factor of two; every other change of size is bilinear and antialiased.
    """
    channels, height, width = shape
    if images.shape[1] == 3 and channels == 1:
        images = (images * images.new_tensor(_LUMA).reshape(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    images = _resize(images, height, width)
    return images.repeat(1, 3, 1, 1) if images.shape[1] == 1 and channels == 3 else images


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    old_height, old_width = images.shape[2:]
    if (old_height, old_width) == (height, width):
        return images
    if old_height <= height < 2 * old_height and old_width <= width < 2 * old_width:
        top, left = (height - old_height) // 2, (width - old_width) // 2
        return functional.pad(images, (left, width - old_width - left, top, height - old_height - top))
    return functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
