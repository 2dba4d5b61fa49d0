"""`computeshare queues`: queues with their workers and jobs."""

from collections.abc import Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, connect
from computeshare.terminal.output import NOTHING, console, how_to_help, plain, print_json

app = typer.Typer(no_args_is_help=True, help="See queues, their workers and jobs.")


@app.callback()
def root() -> None:
    """See queues, their workers and jobs."""


@app.command("list")
def list_queues(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List queues, each with its jobs in serving order."""
    with connect(url, home) as client:
        found = client.queues()
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(queue_table(found))
    else:
        console().print(
            f"no queues yet: a queue appears with its first job or worker: {how_to_help('default')}", markup=False
        )


def queue_table(queues: Sequence[dict[str, Any]]) -> Table:
    """A table with a row for each job of each queue."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Queue", "Workers", "Job", "Name", "State", "Priority", "Has", "Can use"):
        number = heading in ("Workers", "Priority", "Has", "Can use")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for queue in queues:
        first = [Text(plain(queue["name"])), Text(str(queue["workers"]))]
        for job in queue["jobs"] or [None]:
            table.add_row(*first, *(_cells(job) if job else [Text(NOTHING)]))
            first = [Text(), Text()]
    return table


def _cells(job: dict[str, Any]) -> list[Text]:
    return [Text(plain(job[name])) for name in ("id", "title", "status", "priority", "held", "wanted")]
