"""The names, arguments, sizes and limits a job may use, from a committed table.

The table (`catalog.json`) is generated from the installed torch, torchvision and the data sets' definitions by
`python -m computeshare.training.catalog`, so that the control plane can check a job without importing torch.
"""

import json
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
    """`scikit-learn` (bundled) or `torchvision` (downloaded once)."""


class ModelEntry(_Entry):
    """A model: the smallest square input it takes, and its number of parameters at `reference_shape` and 10 classes."""

    source: str
    """`computeshare` or `torchvision`."""
    min_size: int
    batch_norm: bool
    parameters: int
    reference_shape: tuple[int, int, int]


class ArgumentEntry(_Entry):
    """An optimizer's argument: `kind` is one of number, integer, boolean, string, numbers."""

    kind: str
    default: float | int | bool | str | list[float | None] | None
    nullable: bool = False


class OptimizerEntry(_Entry):
    arguments: dict[str, ArgumentEntry]


class Catalog(_Entry):
    torch: str
    torchvision: str
    datasets: dict[str, DatasetEntry]
    models: dict[str, ModelEntry]
    optimizers: dict[str, OptimizerEntry]


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """The committed table."""
    text = resources.files("computeshare").joinpath("catalog.json").read_text()
    return Catalog.model_validate(json.loads(text))
