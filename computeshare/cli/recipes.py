"""`computeshare recipes`: models and data that users bring as Python files."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Json
from computeshare.cli.jobs.spec_options import parse_setting
from computeshare.tasks.recipes import bundle
from computeshare.terminal.output import console, plain, print_json
from computeshare.training.recipe_check import Report, Trial
from computeshare.training.recipe_check import check as try_out

app = typer.Typer(no_args_is_help=True, help="Train models and data of your own.")


@app.callback()
def root() -> None:
    """Train models and data of your own."""


Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="NAME=VALUE", help="An argument for the recipe's model() and data(); repeatable."),
]


@app.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="A Python file, or a folder with a recipe.py.", show_default=False)],
    arg: Arguments = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder that data() reads.", exists=True, file_okay=False, show_default=False)
    ] = None,
    is_confined: Annotated[
        bool, typer.Option("--confined", help="Confine the recipe as workers do, instead of your rights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Try a recipe here: build it twice, take two steps, and say how large it is and what is wrong.

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
