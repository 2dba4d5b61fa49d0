"""The names, arguments, sizes and limits a job may use, from a committed table.

The table (`catalog.json`) is generated from the installed torch, torchvision and the data sets' definitions by
`python -m computeshare.tasks.catalog_table`, so that the control plane can check a job without importing torch.
"""

import importlib.util
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources

from pydantic import BaseModel, ConfigDict


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DatasetEntry(_Entry):
    """A data set: `shape` is (channels, height, width) of one sample."""

    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    source: str
    """`scikit-learn` (bundled), `torchvision` (downloaded once), `hugging face` or `your own`."""
    requires: tuple[str, ...] = ()
    """Packages that ComputeShare does not install by itself."""


class TextEntry(_Entry):
    """A text: its length in characters, and its number of distinct characters."""

    characters: int
    symbols: int
    source: str


class ModelEntry(_Entry):
    """A classifier of images: the smallest square input it takes, and its number of parameters at `reference_shape` and
    10 classes.
    """

    source: str
    """`computeshare` or `torchvision`."""
    min_size: int
    batch_norm: bool
    parameters: int
    parameters_per_class: int
    """How many more each further class takes."""
    reference_shape: tuple[int, int, int]
    grows: bool = False
    """Whether its first dense layer grows with the input."""

    def parameters_with(self, values: int, classes: int) -> int:
        """The largest number of parameters for inputs of so many values, and this many classes."""
        found = self.parameters
        if self.grows:  # its first dense layer, with the input
            reference = self.reference_shape[0] * self.reference_shape[1] * self.reference_shape[2]
            found = max(found, -(-found * values // reference))
        return found + max(0, classes - 10) * self.parameters_per_class  # of the last layer


class RangeEntry(_Entry):
    """The allowed range of a number (from `ge` or `gt`, to `le` or `lt`), or null where that is allowed."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    nullable: bool = False

    def holds(self, value: float | None) -> bool:
        if value is None:
            return self.nullable
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        words = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        text = " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None) or "a number"
        return f"{text}, or null" if self.nullable else text


class ArgumentEntry(_Entry):
    """An optimizer's argument: `kind` is one of number, integer, boolean, string, numbers.

    `ranges` are the allowed ranges of the number, or of each of several numbers.
    """

    kind: str
    default: float | int | bool | str | list[float | None] | None
    nullable: bool = False
    ranges: tuple[RangeEntry, ...] = ()


class OptimizerEntry(_Entry):
    arguments: dict[str, ArgumentEntry]


class Catalog(_Entry):
    torch: str
    torchvision: str
    datasets: dict[str, DatasetEntry]
    """Sets of images."""
    not_offered: dict[str, str]
    """torchvision's other classes, in lower case, and why a job cannot use them."""
    texts: dict[str, TextEntry]
    models: dict[str, ModelEntry]
    """Classifiers of images; `jobspec.tasks.language_models` has the others."""
    optimizers: dict[str, OptimizerEntry]


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """The committed table."""
    text = resources.files("computeshare.jobspec").joinpath("catalog.json").read_text()
    return Catalog.model_validate(json.loads(text))


def normalized_name(name: str) -> str:
    """A data set's name without differences in capitals, hyphens and underscores."""
    return re.sub(r"[-_ ]", "", name.lower())


@lru_cache(maxsize=1)
def dataset_names() -> dict[str, str]:
    """The names of the catalog's data sets by their `normalized_name`."""
    return {normalized_name(name): name for name in catalog().datasets}


def lacking_packages(packages: Iterable[str], extra: str = "data") -> str:
    """The packages to install as text, if one of them is not installed here; otherwise empty."""
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(lacking)}: pip install 'computeshare[{extra}]'" if lacking else ""
