"""The facts of a recipe that are used without running it. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from computeshare.jobspec.part import Part
from computeshare.jobspec.tasks.facts import Metric
from computeshare.tensors.layout import Kind, Layout

MOST_TENSORS = 20_000
INITIAL, FROZEN = "initial.safetensors", "frozen.safetensors"
"""The files of a job's initial state: what is trained, by the names of `tensors`; parameters that are not."""
BUNDLE_PATTERN = r"^sha256:[0-9a-f]{64}$"
"""The name of files by their digest."""


RECIPE_PATTERN = r"^(sha256:[0-9a-f]{64}|package:[A-Za-z0-9._-]{1,64})$"
"""A recipe by the digest of its files, or by its name in an installed package."""


class TensorEntry(Part):
    """An entry of the trained part of a module's `state_dict`."""

    name: str = Field(max_length=500)
    shape: tuple[Annotated[int, Field(ge=0, le=2**31)], ...] = Field(strict=False, max_length=16)
    kind: Kind


class RecipeFacts(Part):
    """Sizes of a recipe with its arguments, found by building its model and opening its data."""

    train: int = Field(ge=1, le=2**40, description="samples that train")
    test: int = Field(ge=1, le=2**40, description="samples of the test split")
    tensors: tuple[TensorEntry, ...] = Field(
        strict=False, max_length=MOST_TENSORS, description="what is trained, in the state dict's order"
    )
    metric: Metric = Field(description="by which versions are compared")
    metrics: tuple[str, ...] = Field((), strict=False, max_length=50, description="names of the recipe's own metrics")
    classes: int = Field(0, ge=0, le=2**31, description="of a classifier; 0: the recipe is none")
    initial: str = Field(
        pattern=BUNDLE_PATTERN,
        description="digest of the files initial.safetensors (version 0) and, if the model has parameters that are not "
        "trained, frozen.safetensors",
    )
    frozen: str = Field(
        "", pattern=r"^([0-9a-f]{64})?$", description="sha256 of the parameters that are not trained; empty: none"
    )
    requires: tuple[Annotated[str, Field(max_length=200)], ...] = Field(
        (), strict=False, max_length=50, description="packages, from the recipe's lines `# requires:`"
    )

    package: str = Field(
        "", max_length=200, description="of a recipe `package:NAME`: the distribution and version, such as `mine 1.2.0`"
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise ValueError(f"two tensors are named {tensor.name}")
            names.add(tensor.name)
        return self

    @property
    def layout(self) -> Layout:
        """The layout of the trained tensors in flat vectors."""
        return Layout.build((one.name, one.shape, one.kind) for one in self.tensors)
