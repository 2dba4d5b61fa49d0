"""The idx files of MNIST and its relatives, in torchvision's layout, memory-mapped. Does not import torch."""

import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from computeshare.errors import DatasetError

Bytes = npt.NDArray[np.uint8]
_PREFIXES = {"train": "train", "test": "t10k"}


def files(folder: Path, split: str) -> tuple[Path, Path]:
    """The paths of the images and the labels of a split ('train' or 'test')."""
    prefix = _PREFIXES[split]
    return folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"


def read_split(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """Images (n, 1, height, width) and labels (n,) of a split, both memory-mapped. Raises DatasetError."""
    images, labels = files(folder, split)
    pixels = read(images, 3)
    return pixels.reshape(len(pixels), 1, *pixels.shape[1:]), read(labels, 1)


def read(path: Path, dimensions: int) -> Bytes:
    """Memory-map an idx file of unsigned bytes, read-only.

    Args:
        path: the uncompressed file.
        dimensions: the expected number of dimensions: 3 for images, 1 for labels.
    Raises: DatasetError: the file is missing, has another magic number, or its length contradicts its header.
    """
    try:
        with path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            length = file.seek(0, 2)
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} is missing: connect to the internet once to download it, or copy it there"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error}): {_REMEDY}") from error
    magic = 0x0800 + dimensions  # 0x08: unsigned bytes
    if len(header) != 4 + 4 * dimensions or int.from_bytes(header[:4], "big") != magic:
        raise DatasetError(f"{path} is not an idx file of {dimensions} dimension(s): {_REMEDY}")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    expected = len(header) + math.prod(shape)
    if length != expected or 0 in shape:
        raise DatasetError(f"{path} holds {length} bytes, but its header gives {expected}: {_REMEDY}")
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=len(header), shape=shape))


_REMEDY = "delete it, so that it is downloaded again, or copy it from elsewhere"
