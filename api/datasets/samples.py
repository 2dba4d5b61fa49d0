"""A few samples of a user's data set to look at, from its prepared files."""

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from api.datasets.schemas import DatasetPublic
from api.errors import NotFound
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, DatasetError
from computeshare.jobspec.tasks.own_data import DatasetFacts
from computeshare.tasks.own.files import INPUTS, TARGETS, TOKENS, OwnData

SHOWN, SHOWN_CHARACTERS, SHOWN_VALUES, SHOWN_FILES = 24, 400, 8, 20
LARGEST_SIDE = 160
"""Of a thumbnail, in pixels."""
SplitName = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample: `index` in its split; the class, if it has one; and what there is to read of it."""

    index: int
    label: str = ""
    text: str = ""


class Samples:
    """Reads samples out of the bundles of data sets."""

    def __init__(self, bundles: BundleStore) -> None:
        self._bundles = bundles

    def shown(self, dataset: DatasetPublic) -> Sequence[Sample]:
        """A few training samples, spread over the split; none if the files cannot be read."""
        try:
            own = self._opened(dataset)
            match dataset.kind:
                case "images":
                    return [Sample(index, dataset.facts.classes[label]) for index, label in _labels(own)]
                case "text":
                    return [Sample(0, text=_text(own))]
                case "arrays":
                    return _rows(own)
            return [Sample(0, text=file.path) for file in self._bundles.manifest(dataset.bundle).files[:SHOWN_FILES]]
        except (BundleError, DatasetError):
            return []

    def thumbnail(self, dataset: DatasetPublic, split: SplitName, index: int) -> bytes:
        """An image as PNG. Raises NotFound: there is no such image. BundleError, DatasetError: it cannot be read."""
        from PIL import Image  # takes a moment to import, which only a page of images needs

        from computeshare.tasks.images.datasets import prepared
        from computeshare.tasks.own.files import IMAGES

        if dataset.kind != "images" or index >= getattr(dataset.facts, split):
            raise NotFound(f"{dataset.name} has no image {index} to {split}")
        images, _ = prepared.read(self._opened(dataset).path(split, IMAGES))
        pixels = images[index].transpose(1, 2, 0)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        target = io.BytesIO()
        image.save(target, "PNG")
        return target.getvalue()

    def _opened(self, dataset: DatasetPublic) -> OwnData:
        about = {"kind": dataset.kind, "bundle": dataset.bundle}
        facts = DatasetFacts.model_validate(dataset.facts.model_dump() | about)
        return OwnData(facts, self._bundles)


def _spread(count: int, most: int) -> Sequence[int]:
    """Up to `most` indices below `count`, evenly apart."""
    return [index * count // min(most, count) for index in range(min(most, count))]


def _labels(own: OwnData) -> Sequence[tuple[int, int]]:
    from computeshare.tasks.images.datasets import prepared
    from computeshare.tasks.own.files import IMAGES

    _, labels = prepared.read(own.path("train", IMAGES))
    return [(index, int(labels[index])) for index in _spread(len(labels), SHOWN)]


def _text(own: OwnData) -> str:
    from computeshare.tasks.text import vocabulary

    numbers = own.array("train", TOKENS)[:SHOWN_CHARACTERS].tolist()
    pieces = vocabulary.of_own(own).decode(numbers)
    return "".join(itertools.islice(itertools.chain.from_iterable(pieces), SHOWN_CHARACTERS))


def _rows(own: OwnData) -> Sequence[Sample]:
    inputs = own.array("train", INPUTS)
    targets = own.array("train", TARGETS) if own.path("train", TARGETS).exists() else None
    found = []
    for index in _spread(len(inputs), SHOWN_VALUES):
        values = inputs[index].reshape(-1)
        text = ", ".join(f"{value:.4g}" for value in values[:SHOWN_VALUES].tolist())
        label = ""
        if targets is not None:
            number = targets[index].reshape(-1)[0]
            label = own.facts.classes[int(number)] if own.facts.classes else f"{number:.4g}"
        found.append(Sample(index, label, text + (", …" if values.size > SHOWN_VALUES else "")))
    return found
