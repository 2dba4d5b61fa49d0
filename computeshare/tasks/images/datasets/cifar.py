"""CIFAR-10 and CIFAR-100 in torchvision's layout, converted once to memory-mapped files. Does not import torch.

The published batches are pickles. They are read only if their MD5 is the published one, and by an unpickler that allows
NumPy arrays and nothing else.
"""

import hashlib
import io
import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.errors import DatasetError
from computeshare.runtime.durability import flush_open

BATCHES: dict[str, dict[str, dict[str, str]]] = {
    "cifar10": {
        "train": {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
    },
    "cifar100": {
        "train": {"train": "16019d7e3df5f24257cddd939b257f8d"},
        "test": {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    },
}
"""The files of each split and their MD5 sums, in order."""
_RECORD = np.dtype([("label", np.uint8), ("image", np.uint8, (3, 32, 32))])
Bytes = npt.NDArray[np.uint8]


def converted(folder: Path, split: str) -> Path:
    """The path of the memory-mapped file of a split ('train' or 'test')."""
    return folder / f"computeshare-{split}.npy"


def read_split(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """Images (n, 3, 32, 32), memory-mapped, and labels (n,) of a converted split. Raises DatasetError."""
    path = converted(folder, split)
    try:
        records = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} is missing: it is made from the batches beside it when the data is prepared"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{path} is damaged ({error}): delete it to have it made again") from error
    if records.dtype != _RECORD or records.ndim != 1:
        raise DatasetError(f"{path} does not hold CIFAR's records: delete it to have it made again")
    return records["image"], records["label"]


def convert(folder: Path, batches: Mapping[str, str], target: Path) -> None:
    """Write the records of `batches` (file name to MD5, in order) to `target`, in one step.

    Raises: DatasetError: a batch is missing or not the published one, or `target` cannot be written.
    """
    records = np.concatenate([_records(folder / name, md5) for name, md5 in batches.items()])
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            np.save(file, records, allow_pickle=False)
            file.flush()
            flush_open(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DatasetError(
            f"{target} cannot be written ({error}): free some space, or make the folder writable"
        ) from error


def _records(path: Path, md5: str) -> npt.NDArray[np.void]:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error}): connect to the internet once, or copy it there"
        ) from error
    if hashlib.md5(blob, usedforsecurity=False).hexdigest() != md5:
        raise DatasetError(
            f"{path} is not the published file (its MD5 differs): delete it, so that it is downloaded again"
        )
    batch = loads(blob)
    labels = batch["fine_labels"] if "fine_labels" in batch else batch["labels"]
    records = np.empty(len(labels), _RECORD)
    records["label"] = labels
    records["image"] = batch["data"].reshape(-1, 3, 32, 32)
    return records


class _ArraysOnly(pickle.Unpickler):
    """Builds containers, strings, numbers and NumPy arrays; any other name in a pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # what these two names, of NumPy 1 and 2, stand for
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def loads(blob: bytes) -> Any:
    """Unpickle containers and NumPy arrays. Raises DatasetError for anything else."""
    try:
        return _ArraysOnly(io.BytesIO(blob), encoding="latin1").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise DatasetError(
            f"not a pickle of arrays ({error}): delete the file, so that it is downloaded again"
        ) from error
