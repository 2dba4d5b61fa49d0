"""The prepared files of a data set that a user added. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, DatasetError
from computeshare.jobspec.tasks.own_data import DatasetFacts

IMAGES, TOKENS, INPUTS, TARGETS = "images.npy", "tokens.npy", "inputs.npy", "targets.npy"
"""A split's files, in the folder with the split's name; the labels of images are beside them."""
TOKENIZER = "tokenizer.json"
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class OwnData:
    """Facts and files of a data set.

    Args:
        bundles: that has the files; None: only the facts are needed.
    """

    facts: DatasetFacts
    bundles: BundleStore | None = None

    def path(self, *parts: str) -> Path:
        """The path of a file. Raises DatasetError: it, or a file beside it, is not on this machine."""
        if self.bundles is None:
            raise DatasetError(
                f"the files of data set {self.facts.bundle[:19]} are not at hand here: run this where the control "
                f"plane or a worker of the job runs"
            )
        try:
            return self.bundles.open_files(self.facts.bundle, parts[:1]).joinpath(*parts)
        except BundleError as error:
            raise DatasetError(str(error)) from error

    def array(self, split: str, name: str) -> Array:
        """An array of a split, mapped and not read. Raises DatasetError."""
        path = self.path(split, name)
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DatasetError(f"{path} cannot be read ({error}): delete the data set's folder there") from error

    def samples(self, split: str) -> int:
        return self.facts.train if split == "train" else self.facts.test

    def check(self, split: str, *arrays: Array) -> None:
        """Raises DatasetError: an array has another length than the facts say."""
        for array in arrays:
            if len(array) != self.samples(split):
                raise DatasetError(
                    f"the {split} split has {len(array):,} samples, not {self.samples(split):,}: add the data set again"
                )
