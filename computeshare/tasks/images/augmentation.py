"""Random transformations of training images, each sample's drawn from its own seed.

A sample's result depends neither on the rest of its batch nor on the machine's earlier draws. `crop` and `flip` equal
torchvision's functions of `torchvision.transforms.v2.functional` on each image; they run on whole batches.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from computeshare.jobspec.sampling_plan import Seeds
from computeshare.tasks.modules import drawn_from

Bytes = npt.NDArray[np.uint8]


def augment(images: Bytes, seeds: Seeds, names: Sequence[str], scale: float = 255.0) -> Bytes:
    """Apply the transformations with these names, in this order.

    Args:
        images: raw images (n, c, h, w).
        seeds: of each sample (n,).
        names: of `TRANSFORMATIONS`.
        scale: the value of a white pixel.
    Returns: images of the same shape, in the same units.
    """
    for name in names:
        images = TRANSFORMATIONS[name](images, seeds, scale)
    return images


def crop(images: Bytes, seeds: Seeds, _: float) -> Bytes:
    """Pad each image with zeros by an eighth of its sides (at least a pixel), and cut it out at a random place."""
    height, width = images.shape[2:]
    rows, columns = max(1, height // 8), max(1, width // 8)
    padded = np.pad(images, ((0, 0), (0, 0), (rows, rows), (columns, columns)))
    tops, lefts = drawn(seeds, 0, 2 * rows + 1), drawn(seeds, 1, 2 * columns + 1)
    out = np.empty_like(images)
    for index, (top, left) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
        out[index] = padded[index, :, top : top + height, left : left + width]
    return out


def flip(images: Bytes, seeds: Seeds, _: float) -> Bytes:
    """Mirror half of the images left to right."""
    chosen = drawn(seeds, 2, 2) == 1
    images = images.copy()
    images[chosen] = images[chosen][..., ::-1]
    return images


def rand_augment(images: Bytes, seeds: Seeds, scale: float) -> Bytes:
    """`torchvision.transforms.v2.RandAugment` with its defaults; torch's global generators stay as they were.

    Works on Pillow's images, as torchvision's data sets yield them: on tensors it takes twice as long.
    """
    from PIL import Image
    from torchvision.transforms.v2 import RandAugment  # seconds to import: only where it is asked for

    transform = RandAugment()
    whole = images if scale == 255 else np.rint(images * (255 / scale)).astype(np.uint8)
    out = np.empty_like(whole)
    with drawn_from(0):
        for index, seed in enumerate(seeds.tolist()):
            torch.default_generator.manual_seed(seed)
            pixels = whole[index].transpose(1, 2, 0)
            changed = transform(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
            out[index] = np.asarray(changed).reshape(pixels.shape).transpose(2, 0, 1)
    return out if scale == 255 else np.rint(out * (scale / 255)).astype(np.uint8)


TRANSFORMATIONS: Mapping[str, Callable[[Bytes, Seeds, float], Bytes]] = {
    "crop": crop,
    "flip": flip,
    "randaugment": rand_augment,
}


def drawn(seeds: Seeds, place: int, count: int) -> npt.NDArray[np.int64]:
    """A number from 0 to `count` - 1 for each seed (n,), from the 16 bits of the seed at `place`, 0 to 3."""
    bits = seeds >> np.uint64(16 * place) & np.uint64(0xFFFF)
    return (bits.astype(np.int64) * count) >> 16
