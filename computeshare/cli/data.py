"""`computeshare data`: data sets of your own."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, Yes, confirm, connect, dataset_names
from computeshare.client import ComputeShare
from computeshare.client.api.datasets import Dataset
from computeshare.jobspec.tasks.own_data import DataKind
from computeshare.terminal.output import age, console, plain, print_json, size

app = typer.Typer(no_args_is_help=True, help="Add data of your own, and list, show or remove them.")
SHOWN_CLASSES = 20
MODELS = {"images": "resnet20", "text": "gpt", "arrays": "mlp"}
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The data set's name.", show_default=False, autocompletion=dataset_names)
]


@app.callback()
def root() -> None:
    """Add data of your own, and list, show or remove them."""


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What jobs will call it.", show_default=False)],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder with a folder of images for each class; a text or a folder of texts; a .npz or .safetensors "
            "file; or files for recipes. Its train and test are the splits, else a tenth is for the test.",
            show_default=False,
        ),
    ],
    kind: Annotated[DataKind | None, typer.Option(help="Default: guessed.", show_default=False)] = None,
    side: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="SIDE|HxW", help="Size to store images in. Default: guessed.", show_default=False
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="characters|bytes|FILE", help="What a text is divided into; FILE: a tokenizer.json.")
    ] = "characters",
    seed: Annotated[int, typer.Option(min=0, help="Decides which samples are for the test.")] = 0,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Prepare data of your own and upload them: then a job can name them in --dataset."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with ComputeShare(url, home=home) as cs, Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        shown: dict[str, Any] = {}

        def advance(doing: str, done: int, whole: int) -> None:
            if doing not in shown:
                shown[doing] = bars.add_task(doing, total=whole)
            bars.update(shown[doing], completed=done, total=whole)

        added = cs.datasets.add(name, path, kind=kind, size=_size(side), tokens=tokens, seed=seed, advance=advance)
    for remark in added.remarks:
        screen.print(Text(plain(remark)))
    if as_json:
        print_json({**added.dataset, "remarks": list(added.remarks)})
        return
    console().print(_details(added.dataset))
    screen.print(
        Text(f"Train on it: computeshare jobs create --dataset {name} {_trained_by(added.dataset)}"), soft_wrap=True
    )


@app.command("list")
def list_(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List the data sets that were added."""
    with connect(url, home) as client:
        found = client.datasets.list()
    if as_json:
        print_json({"items": found})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Name", "Kind"):
        table.add_column(heading, no_wrap=True)
    for heading in ("Train", "Test", "Classes", "Size", "Jobs", "Age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        facts = one["facts"]
        classes = str(len(facts["classes"])) if facts["classes"] else "–"
        counts = (f"{facts['train']:,}", f"{facts['test']:,}", classes)
        since = age(one["created_at"], datetime.now(UTC))
        table.add_row(Text(plain(one["name"])), one["kind"], *counts, size(one["bytes"]), str(len(one["jobs"])), since)
    console().print(table if found else "no data sets yet: computeshare data add NAME PATH")


@app.command("show")
def show(name: Name, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show a data set: its sizes, its classes, and the jobs that use it."""
    with connect(url, home) as client:
        found = client.datasets.show(name)
    if as_json:
        print_json(found)
    else:
        console().print(_details(found))


@app.command("remove")
def remove(name: Name, yes: Yes = False, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Remove a data set and its prepared files; what it was made from stays."""
    with connect(url, home) as client:
        client.datasets.show(name)
        confirm(lambda: f"Remove the data set {name}?", yes)
        client.datasets.remove(name)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        console().print(Text(f"removed {name}"))


def _size(text: str | None) -> tuple[int, int] | None:
    """Raises typer.BadParameter: the text is no size."""
    from computeshare.datasets.images import size_of

    try:
        return size_of(text) if text else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from error


def _trained_by(dataset: Dataset) -> str:
    """The option that names a model, or a recipe for what no built-in model trains on."""
    kind, classes = dataset["kind"], dataset["facts"]["classes"]
    return f"--model {MODELS[kind]}" if kind == "text" or (kind in MODELS and classes) else "--recipe PATH"


def _details(dataset: Dataset) -> Table:
    facts = dataset["facts"]
    unit = {"text": facts["tokens"], "files": "files"}.get(dataset["kind"], "samples")
    split = f"{facts['train']:,} {unit}" + (f" to train, {facts['test']:,} to test" if facts["test"] else "")
    classes = facts["classes"][:SHOWN_CLASSES]
    more = f" and {len(facts['classes']) - len(classes):,} more" if len(facts["classes"]) > len(classes) else ""
    rows = [
        ("Name", dataset["name"]),
        ("Kind", dataset["kind"]),
        ("Data", split),
        ("Shape", " x ".join(map(str, facts["shape"]))),
        ("Classes", f"{len(facts['classes']):,}: {', '.join(classes)}{more}" if classes else ""),
        ("Symbols", f"{facts['symbols']:,}" if facts["symbols"] else ""),
        ("Size", size(dataset["bytes"])),
        ("Bundle", dataset["bundle"]),
        ("Used by", ", ".join(dataset["jobs"])),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for heading, value in rows:
        if value:
            table.add_row(heading, Text(plain(value)))
    return table
