"""Prepares data of any kind to be added, and guesses the kind where it is plain."""

from dataclasses import dataclass
from pathlib import Path

from computeshare.datasets import arrays, images, text
from computeshare.datasets.prepared import Advance, Prepared, is_hidden, quiet
from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.own_data import KINDS, DataKind, DatasetSizes


@dataclass(frozen=True, slots=True)
class Wishes:
    """How data are to be prepared.

    Args:
        size: height and width of images; None: guessed.
        tokens: of a text: `characters`, `bytes`, or the path of a tokenizer file.
        seed: of the test split, where the data come undivided.
    """

    size: tuple[int, int] | None = None
    tokens: str = "characters"
    seed: int = 0


def prepare(
    source: Path, target: Path, kind: DataKind | None = None, wishes: Wishes | None = None, advance: Advance = quiet
) -> Prepared:
    """Prepare the data at `source`, a file or a folder, in the empty folder `target`.

    Files of the kind `files` stay where they are. Raises: DatasetError, PackageMissing.
    """
    wishes = wishes or Wishes()
    if not source.exists():
        raise DatasetError(f"there is no file or folder {source}")
    match kind or guessed(source):
        case "images":
            if not source.is_dir():
                raise DatasetError(f"{source} is a file: give a folder with a folder of images for each class")
            return images.prepare(source, target, wishes.size, wishes.seed, advance)
        case "text":
            return text.prepare(source, target, wishes.tokens, advance)
        case "arrays":
            return arrays.prepare(source, target, wishes.seed, advance)
    return _as_they_are(source)


def guessed(source: Path) -> DataKind:
    """The kind of the data at a path. Raises DatasetError: it is not plain."""
    if arrays.is_arrays(source):
        return "arrays"
    if source.is_file():
        if text.is_text(source):
            return "text"
    elif images.has_classes(source):
        return "images"
    elif not (found := _visible(source)):
        raise DatasetError(f"{source} has no files")
    elif all(map(text.is_text, found)):
        return "text"
    elif all(map(images.is_image, found)):
        return "images"
    raise DatasetError(f"{source} could be of several kinds: give --kind {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def _as_they_are(source: Path) -> Prepared:
    found = [source] if source.is_file() else _visible(source)
    if not found:
        raise DatasetError(f"{source} has no files")
    return Prepared(source, "files", DatasetSizes(train=len(found), test=0), ("It is for recipes alone",))


def _visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not is_hidden(path, folder)]
