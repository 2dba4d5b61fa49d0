"""Tries recipes on this machine and uploads them, with the initial state of their jobs."""

import tempfile
from pathlib import Path
from typing import Any

from computeshare.bundles.manifest import DIGEST
from computeshare.bundles.source import Progress
from computeshare.bundles.store import BundleStore
from computeshare.client.api.calls import Client
from computeshare.client.bundles.downloads import download
from computeshare.client.bundles.uploads import upload
from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.tasks.recipes import bundle
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training.recipe_check import Report, Trial, check


def recipe_of(client: Client, source: str | Path) -> Bundle:
    """The recipe in a file or folder, that of an installed package (`package:NAME`), or the control plane's with this
    digest.

    Raises: RecipeError: it cannot be read. NoServer, Problem.
    """
    if not is_digest(source):
        return bundle.read(Path(source))
    found = Bundle(client.recipes.show(str(source))["files"]).checked()
    if found.digest != source:
        raise RecipeError(f"the control plane answered with another recipe, {found.digest}: nothing of it is run here")
    return found


def is_digest(source: str | Path) -> bool:
    """Whether a recipe is named by its digest, and not by a path."""
    return isinstance(source, str) and source.startswith(DIGEST)


def name_of(source: str | Path) -> str:
    """The name of a file, folder or package's recipe; empty for a digest."""
    if is_digest(source):
        return ""
    return str(source).removeprefix(PACKAGE) if is_package(source) else Path(source).resolve().stem


def is_package(source: str | Path) -> bool:
    """Whether a recipe is that of an installed package."""
    return str(source).startswith(PACKAGE)


def data_folder(client: Client, dataset: str | None, store: BundleStore) -> Path | None:
    """The folder with the files of a data set of the user's own, downloaded unless `store` has them; None: no data set.

    Raises: BundleError: they cannot be stored. NoServer; Problem: there is no such data set.
    """
    if dataset is None:
        return None
    return download(client.bundles, client.datasets.show(dataset)["bundle"], store)


def upload_recipe(
    client: Client, recipe: Bundle, trial: Trial, name: str = "", progress: Progress | None = None
) -> tuple[dict[str, Any], Report]:
    """Try a recipe on this machine, with this user's rights, then upload it and the initial state of its job.

    Returns: the fields of the job's JobSpec, and what the trial found.
    Raises: RecipeError: the recipe cannot train, or workers would refuse it. NoServer, Problem.
    """
    with tempfile.TemporaryDirectory(prefix="state-") as state:
        report = check(recipe, trial, Path(state))
        report.check_trainable()
        if not recipe.package:
            client.recipes.create(recipe.files, name)
        upload(client.bundles, Path(state), progress)
    facts = report.facts.model_dump(mode="json")
    return {"recipe": recipe.digest, "recipe_args": dict(trial.arguments) or None, "recipe_facts": facts}, report
