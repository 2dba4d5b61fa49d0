"""The facts of a recipe that are used without running it. Pure."""

from typing import Literal

from pydantic import Field

from computeshare.jobspec.part import Part
from computeshare.jobspec.tasks.facts import Metric

MOST_TENSORS = 20_000


class TensorEntry(Part):
    """An entry of the trained part of a module's `state_dict`."""

    name: str = Field(max_length=500)
    shape: tuple[int, ...] = Field(max_length=16)
    kind: Literal["parameter", "buffer", "counter"]


class RecipeFacts(Part):
    """Sizes of a recipe with its arguments, found by building its model and opening its data."""

    train: int = Field(ge=1, le=2**40, description="samples that train")
    test: int = Field(ge=1, le=2**40, description="samples of the test split")
    tensors: tuple[TensorEntry, ...] = Field(
        max_length=MOST_TENSORS, description="the layout, in the state dict's order"
    )
    metric: Metric = Field(description="by which versions are compared")
    metrics: tuple[str, ...] = Field((), max_length=50, description="of the recipe's own metrics")
    classes: int = Field(0, ge=0, le=2**31, description="of a classifier; 0: the recipe is none")
