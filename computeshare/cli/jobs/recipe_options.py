"""The options by which a job trains a recipe: it is tried here, then uploaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from computeshare.bundles.store import BundleStore, cache_limit
from computeshare.cli.jobs.spec_options import parse_setting
from computeshare.client import Client
from computeshare.client.bundles.recipe_upload import (
    data_folder,
    is_digest,
    is_package,
    name_of,
    recipe_of,
    upload_recipe,
)
from computeshare.tasks.recipes import bundle
from computeshare.terminal.output import console
from computeshare.training.recipe_check import Trial

RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="PATH|package:NAME|sha256:...",
        show_default=False,
        rich_help_panel="The job",
        help="Train a recipe: a Python file, a folder with a recipe.py, that of an installed package, or the digest of "
        "one that the control plane has. It is tried here first, with your rights.",
    ),
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        show_default=False,
        help="An argument for the recipe's functions; may be repeated.",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder that the recipe's data() reads here; default: the data set's.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class RecipeChoice:
    """A recipe as given on the command line, with its arguments and the folder that its trial reads."""

    source: str
    arguments: Mapping[str, Any]
    folder: Path | None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a JobSpec that are known without a trial. Raises RecipeError: it cannot be read."""
        is_named = is_digest(self.source) or is_package(self.source)
        digest = self.source if is_named else bundle.read(Path(self.source)).digest
        return {"recipe": digest, "recipe_args": dict(self.arguments) or None, "recipe_facts": None}

    def tried(self, client: Client, bundles_dir: Path, seed: int, dataset: str | None) -> dict[str, Any]:
        """Try the recipe, upload it, print what a user should know on standard error; returns the JobSpec's fields.

        Args:
            bundles_dir: gets the files of the data set, unless the user gave a folder.
        Raises: RecipeError, BundleError, NoServer, Problem.
        """
        recipe, store = recipe_of(client, self.source), BundleStore(bundles_dir, cache_limit(bundles_dir, 0))
        folder = self.folder.resolve() if self.folder else data_folder(client, dataset, store)
        with console(stderr=True).status("trying the recipe") as status:
            fields, report = upload_recipe(
                client,
                recipe,
                Trial(self.arguments, folder, seed),
                name_of(self.source),
                lambda done, total: status.update(f"uploading the initial state, {done / max(1, total):.0%}"),
            )
        for remark in report.remarks:
            console(stderr=True).print(f"remark: {remark}", markup=False)
        return fields


def choice_of(
    source: str | None, arguments: Sequence[str], folder: Path | None, given: Mapping[str, Any]
) -> RecipeChoice | None:
    """The recipe to train; None: no recipe, or one whose facts are given.

    Args:
        given: the fields of another JobSpec, whose recipe and arguments the options change.
    Raises: SpecError.
    """
    if source is None and not arguments and (given.get("recipe") is None or given.get("recipe_facts")):
        return None
    recipe = source or given.get("recipe")
    form = "NAME=VALUE, for example width=256"
    changed = dict(parse_setting(text, "--arg", form) for text in arguments)
    if recipe is None:
        raise typer.BadParameter("belongs to a recipe: give --recipe, too", param_hint="--arg")
    return RecipeChoice(recipe, {**(given.get("recipe_args") or {}), **changed}, folder)
