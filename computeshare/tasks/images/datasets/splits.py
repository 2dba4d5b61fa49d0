"""Data sets by name: memory-mapped, checked, and returned as normalised batches.

Files are in torchvision's layout. torchvision itself is imported only to download missing files and to decode images,
which is done once.
"""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from computeshare.errors import DatasetError
from computeshare.jobspec.catalog import lacking_packages
from computeshare.jobspec.sampling_plan import Seeds, permutation
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.tasks.images import augmentation
from computeshare.tasks.images.datasets import cifar, definitions, hugging_face, idx, prepared, torchvision_sets
from computeshare.tasks.images.datasets.definitions import DEFINITIONS, SPLITS, ImagesDefinition, SplitName
from computeshare.tasks.images.transforms import Normaliser, Shape
from computeshare.tasks.own.files import IMAGES, OwnData

Bytes = npt.NDArray[np.uint8]
PREPARED = "prepared"
"""The folder of decoded images, in the data directory."""
_DECODER = 1
"""Counts the changes of what `prepared` files hold."""


@dataclass(frozen=True, slots=True)
class ImageSplit:
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


def open_split(
    name: str,
    split: SplitName,
    data_dir: Path,
    shape: Shape,
    augment: Sequence[str] = (),
    hub: HubArgs | None = None,
) -> ImageSplit:
    """Open a split whose files exist (see `prepare`).

    Args:
        name: a data set of the catalog.
        split: 'train' or 'test'.
        data_dir: folder of the data sets, in torchvision's layout.
        shape: channels, height and width of the images to return; images of another shape are fitted to it.
        augment: as in `ImageSplit`.
        hub: of a data set of Hugging Face.
    Raises: DatasetError: a file is missing, damaged or does not match the catalog.
    """
    definition = definition_of(name, hub)
    images, labels = _read(name, definition, split, data_dir, shape)
    where = data_dir / (PREPARED if definition.files == "decoded" else definition.folder)
    found = f"{name}'s {split} split in {where}"
    return _checked(found, definition, split, images, labels, shape, augment, "so that they are downloaded again")


def open_own(name: str, own: OwnData, split: SplitName, shape: Shape, augment: Sequence[str]) -> ImageSplit:
    """Open a split of a data set that a user added. Args, raises: as `open_split`."""
    images, labels = prepared.read(own.path(split, IMAGES))
    found, remedy = f"{name}'s {split} split", "so that they are fetched again"
    return _checked(found, definitions.of_own(name, own.facts), split, images, labels, shape, augment, remedy)


def _checked(
    found: str,
    definition: ImagesDefinition,
    split: SplitName,
    images: Bytes,
    labels: npt.NDArray[Any],
    shape: Shape,
    augment: Sequence[str],
    remedy: str,
) -> ImageSplit:
    """The split whose raw images and labels these are. Raises DatasetError: they are not as `definition` says."""
    expected = (definition.samples(split), *stored_shape(definition, shape))
    if images.shape != expected or labels.shape != expected[:1]:
        raise DatasetError(
            f"{found} has images {images.shape} and labels {labels.shape}, not {expected} and {expected[:1]}: "
            f"delete its files, {remedy}"
        )
    if labels.max() >= definition.classes:
        raise DatasetError(f"{found} has a label {labels.max()}: delete its label file")
    normalise = Normaliser.build(shape, definition.scale, definition.mean, definition.std)
    return ImageSplit(images, labels.astype(np.int64), normalise, augment)


def prepare(name: str, data_dir: Path, shape: Shape | None = None, hub: HubArgs | None = None) -> None:
    """Make sure that the files that `open_split` reads exist: download missing files, and decode images once.

    Safe for simultaneous processes: one works, the others wait. Each file is moved to its place in one step, so that a
    crash leaves no file that looks complete but is not.

    Args:
        shape: channels, height and width of the images wanted; default: the data set's.
        hub: of a data set of Hugging Face.
    Raises: DatasetError: a file is damaged, or missing and cannot be downloaded; a package is missing; the data of
        Hugging Face are not those that the job was created with.
    """
    definition = definition_of(name, hub)
    shape = shape or definition.shape
    if definition.files == "digits" or _is_ready(name, definition, data_dir, shape):
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(data_dir / f".{_file_name(name)}.lock"):
            if definition.files == "decoded":
                published = hugging_face.opened(name, hub, data_dir) if hub else {}
                _decode(name, definition, data_dir, shape, published)
            elif missing := [path for path in _files(name, data_dir) if not path.exists()]:
                torchvision_sets.download(definition, data_dir, missing)
            if definition.files == "cifar":
                _convert(name, data_dir / definition.folder)
    except OSError as error:
        raise DatasetError(f"{name} cannot be written to {data_dir}: {error}") from error
    if not _is_ready(name, definition, data_dir, shape):
        raise DatasetError(f"{name} in {data_dir} changed while it was prepared: try again")


def sources(name: str) -> list[str]:
    """The URLs from which torchvision downloads a data set (any one suffices); empty for a bundled data set."""
    definition = definition_of(name)
    return torchvision_sets.addresses(definition) if definition.published else []


def stored_shape(definition: ImagesDefinition, shape: Shape) -> Shape:
    """Channels, height and width of the images on disk for a job that wants `shape`."""
    return (definition.shape[0], *shape[1:]) if definition.varying else definition.shape


def prepared_path(name: str, definition: ImagesDefinition, split: SplitName, data_dir: Path, shape: Shape) -> Path:
    """The file of a split's decoded images. Its name has a digest of all that its content depends on."""
    size = "x".join(map(str, stored_shape(definition, shape)))
    origin = (_DECODER, definition.published, definition.train_arguments, definition.test_arguments)
    digest = hashlib.sha256(repr(origin).encode()).hexdigest()[:8]
    return data_dir / PREPARED / f"{_file_name(name)}-{split}-{size}-{digest}.npy"


def definition_of(name: str, hub: HubArgs | None = None) -> ImagesDefinition:
    """A data set by its name. Raises DatasetError: there is none.

    Args:
        hub: of a data set of Hugging Face.
    """
    if hub:
        return definitions.of_hub(name, hub)
    if name not in DEFINITIONS:
        raise DatasetError(f"unknown data set {name!r}; known: {', '.join(sorted(DEFINITIONS))}")
    return DEFINITIONS[name]


def _file_name(name: str) -> str:
    """A data set's name as a part of names of files."""
    return name.replace(":", "-").replace("/", "--")


def _read(
    name: str, definition: ImagesDefinition, split: SplitName, data_dir: Path, shape: Shape
) -> tuple[Bytes, npt.NDArray[Any]]:
    """Raw images (n, c, h, w) and labels (n,). Raises DatasetError."""
    match definition.files:
        case "digits":
            return _digits(split)
        case "idx":
            return idx.read_split(data_dir / definition.folder, split)
        case "cifar":
            return cifar.read_split(data_dir / definition.folder, split)
    return prepared.read(prepared_path(name, definition, split, data_dir, shape))


def _digits(split: SplitName) -> tuple[Bytes, Bytes]:
    """The 1797 digits that come with scikit-learn, split by a fixed shuffle."""
    package = importlib.util.find_spec("sklearn")  # found and not imported: that takes seconds
    if package is None or package.origin is None:
        raise DatasetError("the digits data set needs scikit-learn: install computeshare again")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    chosen = rows[_shuffled(DEFINITIONS["digits"], split)].astype(np.uint8)
    return chosen[:, :-1].reshape(-1, 1, 8, 8), np.ascontiguousarray(chosen[:, -1])


def _shuffled(definition: ImagesDefinition, split: SplitName) -> npt.NDArray[np.int64]:
    """The indices of a split in a set that is published undivided."""
    order = permutation(0, 0, definition.train + definition.test)
    return order[: definition.train] if split == "train" else order[definition.train :]


def _files(name: str, data_dir: Path) -> list[Path]:
    """The files of a data set that is not `decoded`, as published."""
    folder = data_dir / DEFINITIONS[name].folder
    if name in cifar.BATCHES:
        return [folder / batch for split in SPLITS for batch in cifar.BATCHES[name][split]]
    return [path for split in SPLITS for path in idx.files(folder, split)]


def _is_ready(name: str, definition: ImagesDefinition, data_dir: Path, shape: Shape) -> bool:
    """Whether every file that `open_split` reads exists. Raises DatasetError: a file is damaged."""
    match definition.files:
        case "idx":
            needed = _files(name, data_dir)
        case "cifar":
            needed = [cifar.converted(data_dir / definition.folder, split) for split in SPLITS]
        case _:
            needed = [prepared_path(name, definition, split, data_dir, shape) for split in SPLITS]
    if not all(path.exists() for path in needed):
        return False
    for split in SPLITS:
        _read(name, definition, split, data_dir, shape)
    return True


def _convert(name: str, folder: Path) -> None:
    for split in SPLITS:
        target = cifar.converted(folder, split)
        if not target.exists():
            cifar.convert(folder, cifar.BATCHES[name][split], target)


def _decode(
    name: str,
    definition: ImagesDefinition,
    data_dir: Path,
    shape: Shape,
    published: Mapping[SplitName, prepared.Samples],
) -> None:
    """Write the prepared files that are missing, of the splits `published` or, without any, of torchvision's. Raises
    DatasetError.
    """
    if lacking := lacking_packages(definition.requires):
        raise DatasetError(f"{name} {lacking}, on this machine too")
    for split in SPLITS:
        path = prepared_path(name, definition, split, data_dir, shape)
        if path.exists():
            continue
        divided = definition.test_arguments is not None
        samples = published[split if divided else "train"] if published else _published(definition, split, data_dir)
        expected = definition.samples(split) if divided else definition.train + definition.test
        if len(samples) != expected:
            raise DatasetError(
                f"{name} in {data_dir} has {len(samples):,} {split} images, not {expected:,}: delete its files, so "
                f"that they are downloaded again, or copy them there anew"
            )
        order = range(expected) if divided else _shuffled(definition, split).tolist()
        try:
            prepared.write(
                path, samples, order, stored_shape(definition, shape), definition.classes, torch.get_num_threads()
            )
        except DatasetError as error:
            raise DatasetError(f"{name}'s {split} split: {error}") from error


def _published(definition: ImagesDefinition, split: SplitName, data_dir: Path) -> prepared.Samples:
    """torchvision's data set, downloaded if need be. Raises DatasetError."""
    try:
        return torchvision_sets.open_split(definition, split, data_dir)
    except (OSError, RuntimeError):
        torchvision_sets.download(definition, data_dir)
    try:
        return torchvision_sets.open_split(definition, split, data_dir)
    except (OSError, RuntimeError) as error:
        raise DatasetError(f"{definition.published} in {data_dir} is damaged: {error}: delete its files") from error
