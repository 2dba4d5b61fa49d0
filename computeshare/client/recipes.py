"""A job's recipe for use on this machine, by a user who wants its code to run here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from computeshare.bundles.store import BundleStore
from computeshare.client.api.calls import Client
from computeshare.client.bundles.downloads import download
from computeshare.errors import RecipeError, SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipes import PACKAGE, recipe_title
from computeshare.tasks.recipes import bundle, packages
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tasks.usage import Usage

if TYPE_CHECKING:
    from computeshare.tasks.recipes.task import RecipeTask

STORED = "stored"
"""Names the copy of a recipe that the control plane has."""
Chosen = str | Path | None
"""The recipe whose code may run here: its file or folder, or `STORED`; None: none may."""


@dataclass(frozen=True, slots=True)
class JobRecipe:
    """A job's recipe, and the folder with the files of the job's initial state."""

    bundle: Bundle
    state: Path


def job_recipe(
    client: Client, store: BundleStore, spec: JobSpec, chosen: Chosen, only: Sequence[str] = ()
) -> JobRecipe:
    """The recipe of a job that trains one.

    Args:
        only: files of the initial state that are needed; all if it is empty.
    Raises: SpecError: the user chose none. RecipeError: the chosen one is not the job's. BundleError.
    """
    assert spec.recipe and spec.recipe_facts
    if chosen is None:
        raise SpecError(
            f"{recipe_title(spec.recipe)} is code, which runs here only if you say so: give your own file of it, or "
            f"`{STORED}` for the copy that the control plane has (--recipe; in Python recipe=)"
        )
    if chosen == STORED and not spec.recipe.startswith(PACKAGE):
        found = Bundle(client.recipes.show(spec.recipe)["files"]).checked()
    else:
        found = bundle.read(Path(spec.recipe if chosen == STORED else chosen))
    if found.digest != spec.recipe:
        raise RecipeError(
            f"{chosen} is another recipe ({found.digest[:19]}) than the job's ({spec.recipe[:19]}): give the files "
            f"with which the job was created, or `{STORED}`"
        )
    if found.package:
        packages.check(found.package, spec.recipe_facts.package)
    return JobRecipe(found, download(client.bundles, spec.recipe_facts.initial, store, only))


def usage_of(spec: JobSpec) -> Usage:
    """How a recipe's model is used."""
    assert spec.recipe and spec.recipe_facts
    inputs = f"Inputs and outputs are those of `model()` in the files of recipe `{spec.recipe}`."
    if spec.recipe_facts.frozen:
        inputs += " Parameters that were not trained are not in the weights: build or load them as the recipe does."
    build = f"from recipe import model\n\nmodule = model(**{dict(spec.recipe_args or {})!r})"
    return Usage("other", inputs, build, is_whole=not spec.recipe_facts.frozen)


def task_of(spec: JobSpec, recipe: JobRecipe, folder: Path) -> "RecipeTask":
    """The recipe's task in this process, whose code it imports from `folder`, which gets its files. The modules of the
    recipe imported before are forgotten. Raises RecipeError.
    """
    from computeshare.tasks.recipes.functions import forget, load
    from computeshare.tasks.recipes.task import RecipeTask

    assert spec.recipe and spec.recipe_facts
    forget()
    recipe.bundle.write(folder)
    facts = spec.recipe_facts
    return RecipeTask(
        load(folder),
        spec.recipe,
        spec.recipe_args or {},
        state=recipe.state,
        extra=facts.metrics,
        classes=facts.classes,
    )
