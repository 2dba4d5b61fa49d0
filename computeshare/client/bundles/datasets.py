"""`ComputeShare.datasets`: data sets of your own."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from computeshare.client.api.calls import Client
from computeshare.client.api.datasets import Dataset
from computeshare.client.bundles.uploads import upload
from computeshare.datasets.prepared import Advance, quiet
from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.own_data import DataKind, check_name


@dataclass(frozen=True, slots=True)
class Added:
    """A data set that was added, and what there is to know of its preparation, in sentences."""

    dataset: Dataset
    remarks: tuple[str, ...]


class Datasets:
    """The data sets of your own that a control plane keeps."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def add(
        self,
        name: str,
        path: str | Path,
        *,
        kind: DataKind | None = None,
        size: int | tuple[int, int] | None = None,
        tokens: str = "characters",
        seed: int = 0,
        advance: Advance = quiet,
    ) -> Added:
        """Prepare a folder of images by class, a text, arrays or files, and upload it, so that jobs can name it.

        Args:
            path: a file or folder. Its folders `train` and `test` are the splits; else a tenth is for the test.
            kind: `images`, `text`, `arrays` or `files`; default: guessed where it is plain.
            size: side of the square, or height and width, that images are resized to; default: guessed.
            tokens: of a text: `characters`, `bytes`, or the path of a tokenizer file.
            seed: decides which samples are for the test.
            advance: called with what is being done, how much of it is done, and the whole.
        Raises: DatasetError: the data cannot be used. PackageMissing. BundleError. NoServer, Problem.
        """
        from computeshare.datasets.preparation import Wishes, prepare  # Pillow: only where data are prepared

        try:
            check_name(name)
        except ValueError as error:
            raise DatasetError(str(error)) from error
        sides = (size, size) if isinstance(size, int) else size
        scratch = platformdirs.user_cache_path("computeshare", appauthor=False)
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="preparing-", dir=scratch) as folder:
            made = prepare(Path(path).expanduser(), Path(folder), kind, Wishes(sides, tokens, seed), advance)
            digest = upload(self._client.bundles, made.folder, lambda done, whole: advance("upload", done, whole))
            facts = made.sizes.model_dump(mode="json")
            return Added(self._client.datasets.create(name, made.kind, digest, facts), made.remarks)

    def list(self) -> list[Dataset]:
        """All data sets, by name."""
        return self._client.datasets.list()

    def show(self, name: str) -> Dataset:
        """One data set. Raises Problem: there is none."""
        return self._client.datasets.show(name)

    def remove(self, name: str) -> None:
        """Remove a data set and its prepared files. Raises Problem: there is none, or a job uses it."""
        self._client.datasets.remove(name)
