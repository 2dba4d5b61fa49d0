"""Prepares a folder of images by class: decoded, resized once, in one memory-mapped file for each split."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from computeshare.datasets.prepared import TEST_EVERY, Advance, Broken, Prepared, is_hidden, listed
from computeshare.errors import DatasetError
from computeshare.jobspec.sampling_plan import permutation
from computeshare.jobspec.tasks.images import LARGEST_SIDE
from computeshare.jobspec.tasks.own_data import MOST_CLASSES, DatasetSizes
from computeshare.tasks.images import files
from computeshare.tasks.images.datasets import prepared
from computeshare.tasks.own.files import IMAGES

TEST_FOLDERS = ("test", "validation", "valid", "val")
GUESSED_SIDES = (28, 32, 48, 64, 96, 128, 160, 224)
LOOKED_AT = 1000
"""The most images by which size and channels are guessed, and by which mean and deviation are measured."""
_GREY = ("1", "L", "LA", "La", "F", "I")
_UNREADABLE = (".heic", ".heif")
"""Images that Pillow cannot read: they are named rather than passed over."""
Shape = tuple[int, int, int]
Found = list[tuple[Path, int]]


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Paths of images with the numbers of their classes, as `Samples`."""

    found: Found

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        """An image, upright, and its class. Raises InputError."""
        path, label = self.found[index]
        return files.upright(path), label


def prepare(source: Path, target: Path, side: tuple[int, int] | None, seed: int, advance: Advance) -> Prepared:
    """Write the images below `source` to `target`, as `train/images.npy` and `test/images.npy` with their labels.

    Args:
        side: height and width to resize to; None: guessed.
        seed: decides which images are for the test where `source` has no folder for them.
    Raises: DatasetError: there are no classes of images, or too many images cannot be read.
    """
    train, test, remarks = _listed(source)
    names, splits = _numbered(train, test, seed)
    shape = _shape(splits["train"] + splits["test"], side)
    broken = Broken(sum(map(len, splits.values())))
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        advance("images", done, broken.whole)

    for split, found in splits.items():

        def leave_out(index: int, error: DatasetError, found: Found = found) -> None:
            broken.leave_out(str(found[index][0].relative_to(source)), error.__cause__ or error)

        order = range(len(found))
        threads = min(8, os.cpu_count() or 1)
        path = target / split / IMAGES
        prepared.write(path, ImageFiles(found), order, shape, len(names), threads, leave_out, step)
    counts = {split: len(prepared.read(target / split / IMAGES)[1]) for split in splits}
    for split, count in counts.items():
        if not count:
            raise DatasetError(f"no image of the {split} split can be read: {listed(broken.reasons)}")
    mean, std = _statistics(target / "train" / IMAGES)
    sizes = DatasetSizes(train=counts["train"], test=counts["test"], shape=shape, classes=names, mean=mean, std=std)
    return Prepared(target, "images", sizes, (*remarks, *broken.remarks))


def has_classes(source: Path) -> bool:
    """Whether a folder has folders with images, and so is one of images by class."""
    return any(is_image(path) for path in _below(source) if path.parent != source)


def is_image(path: Path) -> bool:
    """Whether a file's name is that of an image."""
    return path.suffix.lower() in _suffixes()


def size_of(text: str) -> tuple[int, int]:
    """Height and width from text: `96`, or `96x128`. Raises ValueError."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(one.isdecimal() and 1 <= int(one) <= LARGEST_SIDE for one in sides):
        raise ValueError(f"{text!r} is no size: give a side as 96, or height and width as 96x128")
    return int(sides[0]), int(sides[-1])


def _listed(source: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]] | None, tuple[str, ...]]:
    """The images of the training split by class, of the test split (None: undivided), and remarks."""
    folders = {path.name.lower(): path for path in sorted(source.iterdir()) if path.is_dir()}
    if "train" not in folders:
        return _by_class(source), None, _others(source)
    test = next((folders[name] for name in TEST_FOLDERS if name in folders), None)
    used = {folders["train"], test}
    unused = [path.name for path in folders.values() if path not in used and not is_hidden(path, source)]
    remarks = (f"Left out the folders {listed(unused)} beside {folders['train'].name}",) if unused else ()
    left = [*_others(folders["train"]), *(_others(test) if test else ())]
    return _by_class(folders["train"]), _by_class(test) if test else None, (*remarks, *left)


def _by_class(folder: Path) -> dict[str, list[Path]]:
    """The images in each folder of `folder`, sorted. Raises DatasetError: two folders' names differ in case alone."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in _below(folder):
        if path.parent != folder and is_image(path):
            found[unicodedata.normalize("NFC", path.relative_to(folder).parts[0])].append(path)
    _check_case(found, folder.name)
    if not found:
        raise DatasetError(
            f"{folder} has no folders with images: put the images of each class into a folder with the class's name"
        )
    return found


def _check_case(names: Iterable[str], where: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise DatasetError(f"{where} has the classes {other} and {name}, which differ in case alone: give them one")


def _others(folder: Path) -> tuple[str, ...]:
    """A remark on files that are no images, or belong to no class."""
    others = [path.name for path in _below(folder) if path.parent == folder or not is_image(path)]
    return (
        (f"Left out {len(others):,} files that are no images in a class's folder: {listed(others)}",) if others else ()
    )


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder, in an order that all machines share."""
    found = (path for path in folder.rglob("*") if path.is_file() and not is_hidden(path, folder))
    return iter(sorted(found, key=lambda path: [unicodedata.normalize("NFC", part) for part in path.parts]))


@cache
def _suffixes() -> frozenset[str]:
    Image.init()
    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    return frozenset(readable - {".pdf", ".mpg", ".mpeg", ".h5", ".hdf"}) | {*_UNREADABLE}


def _numbered(
    train: Mapping[str, list[Path]], test: Mapping[str, list[Path]] | None, seed: int
) -> tuple[tuple[str, ...], dict[str, Found]]:
    """The names of the classes, and each split's images with the numbers of theirs. Raises DatasetError."""
    names = tuple(sorted(train))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise DatasetError(
            f"a classifier needs 2 to {MOST_CLASSES:,} classes, but there is a folder for {len(names):,}: "
            f"give each class a folder of its own ({listed(list(names))})"
        )
    _check_case([*names, *(test or ())], "the data set")
    if strange := sorted((test or {}).keys() - train.keys()):
        raise DatasetError(f"the test folder has classes that the training folder has not: {listed(strange)}")
    found: Found = [(path, label) for label, name in enumerate(names) for path in train[name]]
    if test is not None:
        tested = [(path, label) for label, name in enumerate(names) for path in test.get(name, ())]
        return names, {"train": found, "test": tested}
    if len(found) < TEST_EVERY:
        raise DatasetError(
            f"{len(found)} images are too few to set one in {TEST_EVERY} aside for the test: give at least "
            f"{TEST_EVERY}, or folders train and test, each with a folder for each class"
        )
    return names, divided(found, [label for _, label in found], seed)


def divided(samples: Sequence[Any], labels: Sequence[int], seed: int) -> dict[str, list[Any]]:
    """The samples in two splits: one in `TEST_EVERY` of each class for the test, chosen by `seed`, in their order."""
    shuffled = permutation(seed, 0, len(samples))
    by_class = shuffled[np.argsort(np.asarray(labels)[shuffled], kind="stable")]
    chosen = set(by_class[TEST_EVERY - 1 :: TEST_EVERY].tolist())
    train = [one for index, one in enumerate(samples) if index not in chosen]
    return {"train": train, "test": [samples[index] for index in sorted(chosen)]}


def _shape(found: Found, side: tuple[int, int] | None) -> Shape:
    """Channels, height and width to store: grey if all images looked at are, sides as their usual ones."""
    grey, sides = True, []
    for path, _ in found[:: -(-len(found) // LOOKED_AT)]:
        try:
            with Image.open(path) as image:  # reads the header alone
                grey = grey and image.mode.split(";")[0] in _GREY
                turned = image.getexif().get(0x0112, 1) >= 5  # on its side
                sides.append(image.size if turned else image.size[::-1])
        except Exception:  # noqa: S112 - a broken file is told when it is decoded
            continue
    if not sides:
        raise DatasetError(f"no image can be read: {listed([path.name for path, _ in found])}")
    channels = 1 if grey else 3
    if side:
        return channels, *side
    if len(set(sides)) == 1 and max(sides[0]) <= GUESSED_SIDES[-1]:
        return channels, *sides[0]
    usual = median(min(one) for one in sides)
    guess = max((one for one in GUESSED_SIDES if one <= usual), default=GUESSED_SIDES[0])
    return channels, guess, guess


def _statistics(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values from 0 to 1, to four digits."""
    images, _ = prepared.read(path)
    chosen, sums = images[:: -(-len(images) // LOOKED_AT)], np.zeros((2, images.shape[1]))
    for image in chosen:
        values = image / 255
        sums += [values.mean(axis=(1, 2)), (values**2).mean(axis=(1, 2))]
    mean, square = sums / len(chosen)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return tuple(round(x, 4) for x in mean.tolist()), tuple(max(round(x, 4), 0.0001) for x in std.tolist())
