"""Classifiers of arrays that users added. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.part import error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks import own_data
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts
from computeshare.jobspec.tasks.own_data import DatasetFacts

ARRAY_MODELS = ("mlp",)
"""The classifiers that take inputs of any shape."""


@dataclass(frozen=True, slots=True)
class ArrayTask(TaskSpec):
    """A classifier on arrays."""

    dataset: str
    model: str
    data: DatasetFacts

    sized_by: ClassVar[str] = "dataset"

    @property
    def excluded(self) -> Mapping[str, str]:
        return {
            "input": "is for images only: leave it out",
            "augment": "is for images only: leave it out",
            "model_args": f"model {self.model} has no arguments: leave model_args out",
            **own_data.excluded(self.dataset),
        }

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @property
    def bundles(self) -> tuple[str, ...]:
        return (self.data.bundle,)

    @property
    def facts(self) -> TaskFacts:
        values, classes = math.prod(self.data.shape), len(self.data.classes)
        parameters = catalog().models[self.model].parameters_with(values, classes)
        return TaskFacts(self.data.train, self.data.test, parameters, "accuracy")

    @property
    def train(self) -> int:
        return self.data.train

    def check_names(self) -> None:
        if not self.data.classes:
            message = (
                f"the targets of {self.dataset} are no classes, so it is for recipes: give recipe in place of model"
            )
            raise error_at("JobSpec", "dataset", message)
        if self.model not in ARRAY_MODELS:
            message = f"{self.model} takes images, but {self.dataset} has arrays: choose {ARRAY_MODELS[0]}, or a recipe"
            raise error_at("JobSpec", "model", message)

    def check_sizes(self, plan: Plan) -> None:
        """Do nothing: the model takes any micro-batch."""

    def misfit(self, parent: TaskSpec) -> tuple[str, str] | None:
        if not isinstance(parent, ArrayTask):
            return "dataset", f"the weights are for images, but {self.dataset} has arrays: create a new job"
        if (parent.data.shape, len(parent.data.classes)) != (self.data.shape, len(self.data.classes)):
            return "dataset", f"the weights are for another shape or number of classes than those of {self.dataset}"
        return None
