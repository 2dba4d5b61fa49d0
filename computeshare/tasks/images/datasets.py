"""Data sets by name: memory-mapped, checked, and returned as normalised batches.

Files are in torchvision's layout; torchvision itself is imported only to download missing files.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from computeshare.errors import DatasetError
from computeshare.jobspec.sampling_plan import Seeds, permutation
from computeshare.tasks.images import augmentation, cifar, idx
from computeshare.tasks.images.transforms import Normaliser, Shape

SplitName = Literal["train", "test"]
Bytes = npt.NDArray[np.uint8]
SPLITS: tuple[SplitName, SplitName] = ("train", "test")


@dataclass(frozen=True, slots=True)
class Definition:
    """A data set: `shape` of an image; values are divided by `scale`, then normalised as (x - mean) / std by channel.

    `folder` holds its files, relative to the data directory; `published` is torchvision's name for the data set.
    """

    shape: Shape
    classes: int
    train: int
    test: int
    source: Literal["scikit-learn", "torchvision"]
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    folder: str = ""
    published: str = ""

    def samples(self, split: SplitName) -> int:
        return self.train if split == "train" else self.test


def _like_mnist(name: str, mean: float, std: float) -> Definition:
    shape = (1, 28, 28)
    return Definition(shape, 10, 60_000, 10_000, "torchvision", 255.0, (mean,), (std,), f"{name}/raw", name)


_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DEFINITIONS: dict[str, Definition] = {
    "digits": Definition((1, 8, 8), 10, 1437, 360, "scikit-learn", 16.0, (0.3053,), (0.3760,)),
    "mnist": _like_mnist("MNIST", 0.1307, 0.3081),
    "fashion-mnist": _like_mnist("FashionMNIST", 0.2860, 0.3530),
    "kmnist": _like_mnist("KMNIST", 0.1918, 0.3483),
    "cifar10": Definition(
        (3, 32, 32), 10, 50_000, 10_000, "torchvision", 255.0, _CIFAR_MEAN, _CIFAR_STD, cifar.FOLDER, "CIFAR10"
    ),
}


@dataclass(frozen=True, slots=True)
class Split:
    """One split: raw `images` (n, c, h, w) uint8, `labels` (n,) int64, the normalisation of its batches, and the
    transformations of `augmentation` that training applies before.
    """

    images: Bytes
    labels: npt.NDArray[np.int64]
    normalise: Normaliser
    augment: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: npt.NDArray[np.int64], seeds: Seeds | None = None) -> tuple[Tensor, Tensor]:
        """The samples with these indices (n,): float32 images (n, channels, height, width) and int64 labels (n,).

        Args:
            seeds: for `augment` (n,); None: the images as they are.
        """
        images = self.images[indices]
        if seeds is not None:
            images = augmentation.augment(images, seeds, self.augment, self.normalise.scale)
        return self.normalise(images), torch.from_numpy(self.labels[indices])


def open_split(name: str, split: SplitName, data_dir: Path, shape: Shape, augment: Sequence[str] = ()) -> Split:
    """Open a split whose files exist (see `prepare`).

    Args:
        name: a data set of the catalog.
        split: 'train' or 'test'.
        data_dir: folder of the data sets, in torchvision's layout.
        shape: channels, height and width of the images to return; images of another shape are fitted to it.
        augment: as in `Split`.
    Raises: DatasetError: a file is missing, damaged or does not match the catalog.
    """
    definition = _definition(name)
    images, labels = _READERS[name](data_dir / definition.folder, split)
    expected = (definition.samples(split), *definition.shape)
    where = data_dir / definition.folder
    if images.shape != expected or labels.shape != expected[:1]:
        raise DatasetError(
            f"{name}'s {split} split in {where} has images {images.shape} and labels {labels.shape}, "
            f"not {expected} and {expected[:1]}: delete its files, so that they are downloaded again"
        )
    if labels.max() >= definition.classes:
        raise DatasetError(f"{name}'s {split} split in {where} has a label {labels.max()}: delete its label file")
    normalise = Normaliser.build(shape, definition.scale, definition.mean, definition.std)
    return Split(images, labels.astype(np.int64), normalise, augment)


def prepare(name: str, data_dir: Path) -> None:
    """Make sure that a data set's files exist, and download missing files.

    Safe for simultaneous processes: one downloads, the others wait. Files are downloaded into a temporary folder and
    each is moved to its place in one step, so that a crash leaves no file that looks complete but is not.
    Raises: DatasetError: a file is damaged, or missing and cannot be downloaded.
    """
    definition = _definition(name)
    if definition.source == "scikit-learn" or _is_ready(name, data_dir):
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(data_dir / f".{name}.lock"):
            if missing := [path for path in _files(name, data_dir) if not path.exists()]:
                _download(definition, missing, data_dir)
            if name == "cifar10":
                _convert(data_dir / cifar.FOLDER)
    except OSError as error:
        raise DatasetError(f"{name} cannot be written to {data_dir}: {error}") from error
    if not _is_ready(name, data_dir):
        raise DatasetError(f"{name} in {data_dir} changed while it was prepared: try again")


def sources(name: str) -> list[str]:
    """The URLs from which torchvision downloads a data set (any one suffices); empty for a bundled data set."""
    from torchvision import datasets

    published = getattr(datasets, _definition(name).published, None)
    return list(getattr(published, "mirrors", None) or ([published.url] if published else []))


def _definition(name: str) -> Definition:
    if name not in DEFINITIONS:
        raise DatasetError(f"unknown data set {name!r}; known: {', '.join(sorted(DEFINITIONS))}")
    return DEFINITIONS[name]


def _digits(_: Path, split: SplitName) -> tuple[Bytes, Bytes]:
    """The 1797 digits that come with scikit-learn, split by a fixed shuffle."""
    package = importlib.util.find_spec("sklearn")  # found and not imported: that takes seconds
    if package is None or package.origin is None:
        raise DatasetError("the digits come with scikit-learn, which is not installed")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    train = DEFINITIONS["digits"].train
    order = permutation(0, 0, len(rows))
    chosen = rows[order[:train] if split == "train" else order[train:]].astype(np.uint8)
    return chosen[:, :-1].reshape(-1, 1, 8, 8), np.ascontiguousarray(chosen[:, -1])


_READERS: dict[str, Callable[[Path, SplitName], tuple[Bytes, Bytes]]] = {
    "digits": _digits,
    "mnist": idx.read_split,
    "fashion-mnist": idx.read_split,
    "kmnist": idx.read_split,
    "cifar10": cifar.read_split,
}


def _files(name: str, data_dir: Path) -> list[Path]:
    """The files of a data set as published."""
    folder = data_dir / DEFINITIONS[name].folder
    if name == "cifar10":
        return [folder / batch for split in SPLITS for batch in cifar.BATCHES[split]]
    return [path for split in SPLITS for path in idx.files(folder, split)]


def _is_ready(name: str, data_dir: Path) -> bool:
    """Whether every file that `open_split` reads exists. Raises DatasetError: a file is damaged."""
    folder = data_dir / DEFINITIONS[name].folder
    needed = [cifar.converted(folder, split) for split in SPLITS] if name == "cifar10" else _files(name, data_dir)
    if not all(path.exists() for path in needed):
        return False
    for split in SPLITS:
        _READERS[name](folder, split)
    return True


def _convert(folder: Path) -> None:
    for split in SPLITS:
        target = cifar.converted(folder, split)
        if not target.exists():
            cifar.convert(folder, cifar.BATCHES[split], target)


def _download(definition: Definition, missing: list[Path], data_dir: Path) -> None:
    """Download the data set with torchvision, which checks it, and move the `missing` files into place."""
    from torchvision import datasets  # seconds to import: only where something is missing

    partial = data_dir / f".{definition.published}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a download that was killed; the lock is ours
    try:
        getattr(datasets, definition.published)(partial, download=True)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        names = ", ".join(path.name for path in missing)
        raise DatasetError(
            f"{data_dir / definition.folder} lacks {names}, and the download failed: check this machine's connection, "
            f"or copy the files there ({error})"
        ) from error
    for path in missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        (partial / path.relative_to(data_dir)).replace(path)
    shutil.rmtree(partial)
