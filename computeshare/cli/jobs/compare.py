"""`computeshare jobs compare`."""

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, connect, job_ids
from computeshare.client.api.models import Comparison, quality
from computeshare.jobspec.documents.differences import FEWEST, MOST
from computeshare.terminal.output import (
    NOTHING,
    best,
    console,
    duration,
    number,
    plain,
    print_json,
    size,
    status,
    tested_score,
)


def compare(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB JOB...", help="The ids of two to six jobs.", autocompletion=job_ids),
    ],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show jobs side by side: results, and differences of their specifications.

    computeshare jobs compare ab12cd34 ef56ab78
    """
    if not FEWEST <= len(jobs) <= MOST or len(set(jobs)) < len(jobs):
        raise typer.BadParameter(f"give the ids of {FEWEST} to {MOST} jobs, each once", param_hint="JOB JOB...")
    with connect(url, home) as client:
        found = client.compare(jobs)
    if as_json:
        print_json(found)
    else:
        console().print(side_by_side(found))


def side_by_side(found: Comparison) -> Table:
    """A table with a column for each job: results, then the fields that differ."""
    jobs = found["items"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="bold", no_wrap=True)
    for job in jobs:
        table.add_column(Text(plain(job["id"])), overflow="fold")
    found_at = [f" at {job['best_version']}" if job["best_version"] else "" for job in jobs]
    rows: dict[str, list[str | Text]] = {
        "Name": [plain(job["title"]) for job in jobs],
        "State": [status(job) for job in jobs],
        "Version": [f"{job['version']}/{job['rounds_total']}" for job in jobs],
        "Best": [best(job) + at for job, at in zip(jobs, found_at, strict=True)],
        "Last": [quality(job) or NOTHING for job in jobs],
        **({"Test set, best": list(map(tested_score, jobs))} if any(job.get("tested") for job in jobs) else {}),
        "Lowest test loss": [number(job["lowest_test_loss"]) for job in jobs],
        "Loss": [number(job["loss"]) for job in jobs],
        "Up": [size(job["bytes_up"]) for job in jobs],
        "Down": [size(job["bytes_down"]) for job in jobs],
        "Dropped": [f"{job['dropped']:,} of {job['dropped'] + job['accepted']:,}" for job in jobs],
        "Time": [duration(job["seconds"]) for job in jobs],
    }
    rows |= {plain(path): [_value(value) for value in values] for path, values in found["differences"].items()}
    for name, cells in rows.items():
        table.add_row(Text(name), *(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def _value(value: object) -> str:
    return NOTHING if value is None else plain(value if isinstance(value, str) else json.dumps(value))
