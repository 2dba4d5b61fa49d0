"""Recipes that a JobSpec may name: models, data and losses that users bring as code. Pure, and runs none of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, JsonValue

from computeshare.jobspec.part import error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts
from computeshare.jobspec.tasks.own_data import DatasetFacts, is_own_name
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts
from computeshare.tensors.layout import Layout

MOST_ARGUMENT_BYTES = 10_000
PACKAGE = "package:"
"""Prefix of a recipe that an installed package has."""


def checked_arguments(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A recipe's arguments. Raises ValueError: a name cannot be a parameter's, or they are too large."""
    for name in arguments:
        if not name.isidentifier() or len(name) > 100:
            raise ValueError(f"{name!r} cannot be the name of an argument: use letters, digits and _")
    size = len(json.dumps(arguments, allow_nan=False))
    if size > MOST_ARGUMENT_BYTES:
        raise ValueError(f"must have at most {MOST_ARGUMENT_BYTES:,} bytes as JSON, not {size:,}: read data from files")
    return arguments


RecipeArgs = Annotated[dict[str, JsonValue], AfterValidator(checked_arguments)]


@dataclass(frozen=True, slots=True)
class RecipeTask(TaskSpec):
    """A recipe with its arguments.

    Args:
        recipe: the digest of its files.
        found: its sizes; None: they are still to be found out.
        data: of the data set, which a user added.
    """

    recipe: str
    arguments: Mapping[str, Any]
    found: RecipeFacts | None = None
    dataset: str | None = None
    data: DatasetFacts | None = None

    sized_by: ClassVar[str] = "recipe_args"

    @property
    def excluded(self) -> Mapping[str, str]:
        own = "belongs to the recipe: leave it out, and set recipe_args"
        return {
            "model": "a recipe has a model of its own: leave model or recipe out",
            "model_args": own,
            "input": own,
            "augment": "is for images of the built-in data sets only: leave it out, and let the recipe's data() do it",
            "dataset_args": own,
            **(
                {}
                if self._has_own_data
                else {"data": "belongs to a data set of your own: set dataset, or leave it out"}
            ),
        }

    @property
    def _has_own_data(self) -> bool:
        return self.dataset is not None and is_own_name(self.dataset)

    @property
    def title(self) -> str:
        return recipe_title(self.recipe) + (f" on {self.dataset}" if self.dataset else "")

    @property
    def needs_facts(self) -> bool:
        return self.found is None or (self._has_own_data and self.data is None)

    @property
    def recipe_facts(self) -> RecipeFacts:
        """Raises ValueError: they are still to be found out."""
        if self.found is None:
            raise ValueError(f"the facts of {recipe_title(self.recipe)} have not been found out yet")
        return self.found

    @property
    def facts(self) -> TaskFacts:
        found = self.recipe_facts
        return TaskFacts(found.train, found.test, self.layout.parameters, found.metric)

    @property
    def train(self) -> int:
        return self.recipe_facts.train

    @property
    def layout(self) -> Layout:
        """The layout of the trained tensors in flat vectors. Raises ValueError, as `facts`."""
        return self.recipe_facts.layout

    @property
    def has_buffers(self) -> bool:
        return self.layout.buffers > 0

    @property
    def bundles(self) -> tuple[str, ...]:
        return (self.recipe_facts.initial, *((self.data.bundle,) if self.data else ()))

    def check_names(self) -> None:
        if self.found and self.recipe.startswith(PACKAGE) != bool(self.found.package):
            message = "names the release of a recipe package:NAME, and of no other"
            raise error_at("JobSpec", ("recipe_facts", "package"), message)
        if self.dataset is not None and not self._has_own_data:
            message = "a recipe cannot read a built-in data set: leave dataset out, and let the recipe's data() read it"
            raise error_at("JobSpec", "dataset", message)

    def check_sizes(self, plan: Plan) -> None:
        """Raises ValueError: nothing is trained, or version 0 has no parameter."""
        if not self.facts.parameters:
            raise ValueError("the recipe's model has no parameter to train: let some parameters require a gradient")

    def misfit(self, parent: TaskSpec) -> tuple[str, str] | None:
        if not isinstance(parent, RecipeTask):
            return "recipe", "a fork keeps its parent's model: leave recipe out, or create a new job"
        old, new = parent.recipe_facts, self.recipe_facts
        if old.tensors != new.tensors:
            different = next(b or a for a, b in zip_longest(*map(_tensors, (old, new))) if a != b)
            return "recipe", (
                f"its model has other tensors than the weights (the first: {different}): fork with a recipe and "
                "arguments that build the same ones, or create a new job"
            )
        if old.frozen != new.frozen:
            return "recipe", (
                "its parameters that are not trained differ from those that the weights were trained beside: load the "
                "same, or create a new job"
            )
        return None


def _tensors(facts: RecipeFacts) -> list[str]:
    return [f"{one.name}, a {one.kind} of shape {list(one.shape)}" for one in facts.tensors]


def recipe_title(recipe: str) -> str:
    """The title of a recipe, from its digest or name."""
    return (
        f"recipe {recipe.removeprefix(PACKAGE) if recipe.startswith(PACKAGE) else recipe.removeprefix('sha256:')[:8]}"
    )


def lacking_package(recipe: str, release: str, packages: Mapping[str, str]) -> str:
    """Why a machine's packages do not fit recipe `package:NAME`, in words to follow the machine's name; empty: they do.

    Args:
        release: with which the job was created, such as `mine 1.2.0`.
        packages: the machine's, by the names of their recipes.
    """
    name = recipe.removeprefix(PACKAGE)
    if (found := packages.get(name)) == release:
        return ""
    has = f"has {found}, and the job needs {release}" if found else f"has no recipe {name}"
    return f"{has}: install {release.replace(' ', '==')} there, then start the worker again"
