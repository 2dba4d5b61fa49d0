"""The classes of `torchvision.datasets`: download their files, and open them. Imports torchvision where that is needed,
since it takes seconds.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from computeshare.errors import DatasetError
from computeshare.tasks.images.datasets.definitions import SPLITS, ImagesDefinition, SplitName
from computeshare.tasks.images.datasets.prepared import Samples


def addresses(definition: ImagesDefinition) -> list[str]:
    """The URLs from which torchvision downloads a data set, any one of which suffices, where its class names them."""
    published = _class(definition)
    return list(getattr(published, "mirrors", None) or ([published.url] if hasattr(published, "url") else []))


def open_split(definition: ImagesDefinition, split: SplitName, data_dir: Path, *, download: bool = False) -> Samples:
    """torchvision's data set over the files in `data_dir`, with its samples in an order that all machines share.

    Raises: OSError, RuntimeError: as torchvision does where files are missing or damaged.
    """
    options = {} if definition.by_hand else {"download": download}
    found: Samples = _class(definition)(data_dir, **definition.arguments(split), **options)
    _sort(found)
    return found


def download(definition: ImagesDefinition, data_dir: Path, missing: Sequence[Path] = ()) -> None:
    """Download the data set with torchvision, which checks it, and move its files into place.

    A download goes to a folder of its own first, so that one that is killed leaves nothing that looks complete. The
    caller holds a lock.

    Args:
        missing: the files to move; none: all that `data_dir` lacks.
    Raises: DatasetError: the download failed.
    """
    named = ", ".join(path.name for path in missing) or f"files of {definition.published}"
    lacks = f"{data_dir / definition.folder} lacks {named}"
    if definition.by_hand:
        raise DatasetError(f"{lacks}, which torchvision cannot download: copy them there, as its documentation says")
    partial = data_dir / f".{definition.published}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for split in SPLITS:
            open_split(definition, split, partial, download=True)
        if missing:
            for path in missing:
                path.parent.mkdir(parents=True, exist_ok=True)
                (partial / path.relative_to(data_dir)).replace(path)
        else:
            _fill(data_dir, partial)
    except (OSError, RuntimeError) as error:
        raise DatasetError(
            f"{lacks}, and the download failed: check this machine's connection, or copy the files there ({error})"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _class(definition: ImagesDefinition) -> Any:
    from torchvision import datasets

    return getattr(datasets, definition.published)


def _fill(folder: Path, source: Path) -> None:
    """Move what `folder` lacks out of `source`, with its folders."""
    for path in source.iterdir():
        target = folder / path.name
        if not target.exists():
            path.replace(target)
        elif path.is_dir():
            _fill(target, path)


def _sort(found: Any) -> None:
    """Sort the samples that torchvision lists in the file system's order, which differs from machine to machine."""
    match type(found).__name__:
        case "SUN397":
            pairs = sorted(zip(found._image_files, found._labels, strict=True))
            found._image_files, found._labels = [path for path, _ in pairs], [label for _, label in pairs]
        case "INaturalist":
            found.index.sort()
        case "Omniglot":
            names = sorted(found._characters)
            labels = {name: label for label, name in enumerate(names)}
            samples = [(image, labels[found._characters[label]]) for image, label in found._flat_character_images]
            found._characters, found._flat_character_images = names, sorted(samples, key=lambda one: one[::-1])
