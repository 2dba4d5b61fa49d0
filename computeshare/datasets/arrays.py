"""Prepares arrays from `.npz` or `.safetensors` files: inputs and targets, in memory-mapped files for each split."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from computeshare.datasets.images import divided
from computeshare.datasets.prepared import TEST_EVERY, Advance, Prepared, listed
from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.own_data import MOST_CLASSES, DatasetSizes
from computeshare.tasks.own.files import INPUTS, TARGETS
from computeshare.tensors.npy_writer import npy_writer

SUFFIXES = (".npz", ".safetensors")
_ROLES = {
    **dict.fromkeys(("inputs", "input", "x", "data", "images", "features"), "inputs"),
    **dict.fromkeys(("targets", "target", "y", "labels", "label"), "targets"),
}
_SPLITS = {"train": "train", "training": "train", **dict.fromkeys(("test", "val", "valid", "validation"), "test")}
_FILES = {"inputs": INPUTS, "targets": TARGETS}
_ROWS = 4096
_FORM = (
    "name the arrays inputs and targets, or x_train, y_train, x_test and y_test; or give a folder with "
    "train.npz and test.npz"
)
Array = npt.NDArray[Any]
Pair = dict[str, Array]


def prepare(source: Path, target: Path, seed: int, advance: Advance) -> Prepared:
    """Write the arrays to `target`, as `inputs.npy` and `targets.npy` in `train` and in `test`.

    Targets of whole numbers from 0, or of words, are classes. Floating-point numbers become float32.
    Raises: DatasetError: there are no inputs, lengths differ, or values are no numbers.
    """
    splits = {split: _checked(pair, split) for split, pair in _read(source).items()}
    if "train" not in splits:
        raise DatasetError(f"{source} has no training inputs: {_FORM}")
    classes = _as_classes(splits)
    if "test" not in splits:
        splits = _parted(splits["train"], bool(classes), seed)
    train, test = splits["train"], splits["test"]
    for name in train:
        if name not in test or train[name].shape[1:] != test[name].shape[1:]:
            raise DatasetError(f"the {name} of train and test differ in shape: {_shapes(train)} and {_shapes(test)}")
    whole = sum(len(array) for pair in splits.values() for array in pair.values())
    done = 0
    for split, pair in splits.items():
        for name, array in pair.items():
            with npy_writer(target / split / _FILES[name], array.dtype, array.shape[1:]) as writer:
                for start in range(0, len(array), _ROWS):
                    writer.append(array[start : start + _ROWS])
                    done += len(array[start : start + _ROWS])
                    advance("arrays", done, whole)
    inputs = train["inputs"]
    mean, std = float(inputs.mean(dtype=np.float64)), float(inputs.std(dtype=np.float64))
    sizes = DatasetSizes(
        train=len(inputs),
        test=len(test["inputs"]),
        shape=inputs.shape[1:] or (1,),
        classes=classes,
        mean=(float(f"{mean:.6g}"),),
        std=(float(f"{std:.6g}") or 1.0,),
    )
    return Prepared(target, "arrays", sizes, _remarks(train, classes))


def is_arrays(path: Path) -> bool:
    """Whether a path is a file of arrays, or a folder that has one for training."""
    if path.is_dir():
        return any(path.joinpath(f"train{suffix}").is_file() for suffix in SUFFIXES)
    return path.suffix.lower() in SUFFIXES


def _remarks(train: Pair, classes: tuple[str, ...]) -> tuple[str, ...]:
    if classes:
        return ()
    what = "its targets are no classes" if "targets" in train else "it has no targets"
    return (f"It is for recipes alone, since {what}",)


def _read(source: Path) -> dict[str, Pair]:
    """The arrays by split and role; those of an undivided file are `train`. Raises DatasetError."""
    found: dict[str, Pair] = {}
    if source.is_dir():
        for path in sorted(source.iterdir()):
            if path.suffix.lower() in SUFFIXES and (split := _SPLITS.get(path.stem.lower())):
                found.setdefault(split, {}).update(_named(_loaded(path), path).get("train", {}))
        return found
    return _named(_loaded(source), source)


def _named(arrays: Mapping[str, Array], path: Path) -> dict[str, Pair]:
    found: dict[str, Pair] = {}
    for name, array in arrays.items():
        words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
        roles = [_ROLES[word] for word in words if word in _ROLES]
        split = next((_SPLITS[word] for word in words if word in _SPLITS), "train")
        if len(roles) != 1 or roles[0] in found.get(split, {}):
            raise DatasetError(f"{path.name} has the arrays {listed(list(arrays))}: {_FORM}")
        found.setdefault(split, {})[roles[0]] = array
    return found


def _loaded(path: Path) -> dict[str, Array]:
    if path.suffix.lower() not in SUFFIXES:
        told = f"{path} is neither a .npz nor a .safetensors file: give one, a folder of them, or another --kind"
        raise DatasetError(told)
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        with safe_open(path, framework="np") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, SafetensorError) as error:
        # NumPy's own message advises to unpickle the file
        reason = "it has pickled objects, or is no file of arrays" if "pickle" in str(error) else error
        raise DatasetError(f"{path} cannot be read: {reason}") from error


def _checked(pair: Pair, split: str) -> Pair:
    """Arrays of one length, of numbers that training can use. Raises DatasetError."""
    if "inputs" not in pair:
        raise DatasetError(f"the {split} split has no inputs: {_FORM}")
    lengths = {len(array) if array.ndim else 0 for array in pair.values()}
    if len(lengths) > 1 or 0 in lengths:
        raise DatasetError(f"inputs and targets of {split} must be as many, and some: they are {_shapes(pair)}")
    return {name: _numbers(name, array) for name, array in pair.items()}


def _numbers(name: str, array: Array) -> Array:
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise DatasetError(f"the {name} have values that are no numbers: take those samples out")
        return array.astype(np.float32, copy=False)
    if array.dtype.kind in "US" and name == "targets" and array.ndim == 1:
        return array
    if array.dtype.kind not in "iub":
        raise DatasetError(f"the {name} are {array.dtype}: give real numbers, or words as targets")
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.int64) if name == "targets" else array


def _as_classes(splits: dict[str, Pair]) -> tuple[str, ...]:
    """The names of the classes, empty if the targets are none; words become the numbers of classes. Raises
    DatasetError.
    """
    targets = [pair["targets"] for pair in splits.values() if "targets" in pair]
    if not targets or len(targets) < len(splits) or any(one.ndim != 1 for one in targets):
        return ()
    if targets[0].dtype.kind in "US":
        names, numbers = np.unique(np.concatenate(targets), return_inverse=True)
        for pair in splits.values():
            pair["targets"], numbers = numbers[: len(pair["targets"])].astype(np.int64), numbers[len(pair["targets"]) :]
        return _counted(tuple(str(name.decode() if isinstance(name, bytes) else name) for name in names.tolist()))
    if any(one.dtype.kind == "f" for one in targets) or min(int(one.min()) for one in targets) < 0:
        return ()
    last = max(int(one.max()) for one in targets)
    return _counted(tuple(map(str, range(last + 1)))) if last < MOST_CLASSES else ()


def _counted(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if 2 <= len(names) <= MOST_CLASSES else ()


def _parted(pair: Pair, by_class: bool, seed: int) -> dict[str, Pair]:
    count = len(pair["inputs"])
    if count < TEST_EVERY:
        raise DatasetError(
            f"{count} samples are too few to set one in {TEST_EVERY} aside for the test: give at least {TEST_EVERY}, "
            "or files named train and test"
        )
    labels = pair["targets"].tolist() if by_class else [0] * count
    chosen = divided(range(count), labels, seed)
    return {split: {name: array[indices] for name, array in pair.items()} for split, indices in chosen.items()}


def _shapes(pair: Pair) -> str:
    return ", ".join(f"{name} {array.shape}" for name, array in pair.items())
