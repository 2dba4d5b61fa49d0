"""Decoded images and their labels in memory-mapped files, made once on a machine. Does not import torch."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from computeshare.errors import DatasetError, InputError
from computeshare.tensors.npy_writer import npy_writer

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.uint16]
Shape = tuple[int, int, int]
CHUNK_BYTES = 1 << 26
_LABEL = np.dtype("<u2")


class Samples(Protocol):
    """Pairs of a PIL image and its label, an integer from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


def _refuse(_: int, error: DatasetError) -> None:
    raise error


def labels_path(images: Path) -> Path:
    """The file of the labels that belongs to a file of images."""
    return images.with_suffix(".labels.npy")


def read(path: Path) -> tuple[Bytes, Labels]:
    """Images (n, channels, height, width), memory-mapped, and labels (n,). Raises DatasetError."""
    try:
        images = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        labels = np.load(labels_path(path), allow_pickle=False)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: it is made when the data is prepared") from error
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{path} is damaged ({error}): delete it to have it made again") from error
    if images.dtype != np.uint8 or labels.dtype != _LABEL:
        raise DatasetError(f"{path} does not hold images and labels: delete it to have it made again")
    return images, labels


def write(
    path: Path,
    samples: Samples,
    order: Sequence[int],
    shape: Shape,
    classes: int,
    threads: int,
    broken: Callable[[int, DatasetError], object] = _refuse,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Decode the samples with the indices `order` and write them to `path`, in one step.

    Images of another size are resized and cropped to `shape`, about their centre. The caller holds a lock.

    Args:
        broken: gets the index of a sample that cannot be read, with the error; if it returns, the sample is left out.
        advance: gets the number of samples done since it was called before.
    Raises: DatasetError: a sample cannot be read or has no label below `classes`, or the disk cannot take the files.
    """
    labels: list[int] = []
    length = max(1, CHUNK_BYTES // int(np.prod(shape)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path.parent, len(order) * int(np.prod(shape)))
        with ThreadPoolExecutor(threads) as pool, npy_writer(path, np.uint8, shape) as images:
            for start in range(0, len(order), length):
                chunk = order[start : start + length]
                found = pool.map(lambda index: _sample(samples, index, shape, classes), chunk)
                for index, one in zip(chunk, found, strict=True):
                    if isinstance(one, DatasetError):
                        broken(index, one)
                    else:
                        images.append(one[0][None])
                        labels.append(one[1])
                    advance(1)
            with npy_writer(labels_path(path), _LABEL) as written:  # first, so that who finds images finds labels
                written.append(np.array(labels, _LABEL))
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written ({error}): free some space, or make the folder writable"
        ) from error


def _check_room(folder: Path, needed: int) -> None:
    """Raises DatasetError: the disk has fewer than `needed` bytes left."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise DatasetError(
            f"the decoded images need {needed / 1e9:,.1f} GB in {folder}, and {free / 1e9:,.1f} GB are free: "
            f"free some space, or set a smaller input"
        )


def _sample(samples: Samples, index: int, shape: Shape, classes: int) -> tuple[Bytes, int] | DatasetError:
    """The pixels, in this shape, and the label; or why there are none."""
    from computeshare.tasks.images.files import pixels  # imports Pillow, which prepared files do not need

    try:
        image, label = samples[index]
        if label is None or not 0 <= int(label) < classes:
            raise ValueError(f"its label is {label}, not one of 0 to {classes - 1}")
        return pixels(image, shape), int(label)
    except (InputError, OSError, SyntaxError, ValueError) as error:  # Pillow raises SyntaxError for a broken PNG
        return DatasetError(f"sample {index} cannot be read: {error}")
