"""`computeshare recipes`: models and data that users bring as Python files."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.bundles.manifest import DIGEST
from computeshare.cli.connection import Home, Json, Url, Yes, confirm, connect
from computeshare.cli.jobs.recipe_options import ArgOption, FolderOption
from computeshare.cli.jobs.spec_options import parse_setting
from computeshare.client import Client
from computeshare.client.api.models import Problem
from computeshare.client.api.recipes import Recipe
from computeshare.tasks.recipes import bundle
from computeshare.terminal.command import FAILED
from computeshare.terminal.output import age, console, plain, print_json, size
from computeshare.training.recipe_check import Report, Trial
from computeshare.training.recipe_check import check as try_out

app = typer.Typer(no_args_is_help=True, help="Train models and data of your own.")


@app.callback()
def root() -> None:
    """Train models and data of your own."""


Digest = Annotated[
    str, typer.Argument(metavar="DIGEST", help="The recipe's digest, or its beginning.", show_default=False)
]


@app.command("check")
def check(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A Python file, or a folder with a recipe.py.", show_default=False)
    ],
    arg: ArgOption = None,
    folder: FolderOption = None,
    is_confined: Annotated[
        bool, typer.Option("--confined", help="Confine the recipe as workers do, instead of your rights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Try a recipe here: build it twice, take two steps, and say how large it is and what is wrong. The exit code is 1
    if workers would refuse it.

    Runs the recipe's code on this machine, with your rights unless --confined is given.
    """
    recipe = bundle.read(path)
    arguments = dict(parse_setting(text, "--arg", "NAME=VALUE, for example width=256") for text in arg or ())
    with console(stderr=True).status("trying the recipe"):
        report = try_out(recipe, Trial(arguments, folder.resolve() if folder else None, is_confined=is_confined))
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        console().print(_table(report))
    if not report.is_deterministic:
        raise typer.Exit(FAILED)


@app.command("list")
def list_recipes(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List the recipes that the control plane has, newest first."""
    with connect(url, home) as client:
        recipes = client.recipes.list()
    if as_json:
        print_json({"items": recipes})
    elif recipes:
        console().print(_listed(recipes))
    else:
        console().print("no recipes here; train one: computeshare jobs create --recipe PATH", markup=False)


@app.command()
def show(digest: Digest, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show a recipe's files."""
    with connect(url, home) as client:
        recipe = client.recipes.show(_whole(client, digest))
    if as_json:
        print_json(recipe)
        return
    out = console()
    for path, text in recipe["files"].items():
        out.print(f"{plain(path)}:", style="bold", markup=False)
        out.print(plain(text, lines=True).rstrip(), markup=False, soft_wrap=True)


@app.command()
def remove(digest: Digest, yes: Yes = False, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Remove a recipe that no unfinished job trains. Jobs that trained it can be neither retried nor forked."""
    with connect(url, home) as client:
        whole = _whole(client, digest)
        confirm(lambda: f"Remove recipe {plain(whole)}?", yes)
        client.recipes.delete(whole)
    if as_json:
        print_json({"digest": whole, "deleted": True})
    else:
        console().print(f"removed {plain(whole)}", markup=False)


def _whole(client: Client, digest: str) -> str:
    """The digest of the only recipe whose digest begins so, with or without `sha256:`. Raises Problem: several do."""
    found = [
        one["digest"]
        for one in client.recipes.list()
        if one["digest"].removeprefix(DIGEST).startswith(digest.removeprefix(DIGEST))
    ]
    if len(found) > 1:
        raise Problem(f"{len(found)} recipes begin with {digest}: give more of the digest", 409)
    return found[0] if found else digest


def _listed(recipes: Sequence[Recipe]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("Recipe", "Name", "Size", "Jobs", "Added"):
        table.add_column(heading, justify="right" if heading in ("Size", "Jobs") else "left", no_wrap=True)
    now = datetime.now(UTC)
    for one in recipes:
        added = f"{age(one['created_at'], now)} ago"
        table.add_row(one["digest"][:19], plain(one["name"]), size(one["bytes"]), f"{one['jobs']:,}", added)
    return table


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, Text(plain(str(value))))
    return table


def _rows(report: Report) -> list[tuple[str, Any]]:
    facts = report.facts
    frozen = f", and {report.frozen:,} that are frozen" if report.frozen else ""
    rows = [
        ("Recipe", report.digest),
        ("Parameters", f"{report.parameters:,}{frozen}"),
        ("Samples", f"{facts.train:,} to train, {facts.test:,} to test"),
        ("Compared by", facts.metric),
        ("Own metrics", ", ".join(facts.metrics)),
        ("Same bits twice", "yes" if report.is_deterministic else "no"),
        ("Loss", f"{report.loss:.4g} after a step, which took {report.step_s:.2g} s"),
        *(("Remark", remark) for remark in report.remarks),
    ]
    return [(name, value) for name, value in rows if value]
