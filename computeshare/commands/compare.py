"""`computeshare jobs compare`."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.answers import Job
from computeshare.client import Client
from computeshare.commands.connection import Home, Json, Url, connect, job_ids
from computeshare.commands.output import (
    NOTHING,
    console,
    duration,
    elapsed_s,
    number,
    percent,
    plain,
    print_json,
    size,
    status,
    title,
    uncounted,
)
from computeshare.comparing import FEWEST, MOST, differences

MOST_SCORES = 10_000
"""Scored versions that are asked for at once; of more, a series leaves some out evenly."""


def compare(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB JOB...", help="The ids of two to six jobs.", autocompletion=job_ids),
    ],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show jobs side by side: what they were asked for that differs, and what came of it.

    computeshare jobs compare ab12cd34 ef56ab78
    """
    if not FEWEST <= len(jobs) <= MOST or len(set(jobs)) < len(jobs):
        raise typer.BadParameter(f"give the ids of {FEWEST} to {MOST} jobs, each once", param_hint="JOB JOB...")
    with connect(url, home) as client:
        found = [client.show(job_id) for job_id in jobs]
        lowest = [lowest_loss(client, job_id) for job_id in jobs]
    now, differing = datetime.now(UTC), differences([job["spec"] for job in found])
    if as_json:
        items = [outcome(job, loss, now) for job, loss in zip(found, lowest, strict=True)]
        print_json({"items": items, "differences": differing})
    else:
        console().print(side_by_side(found, lowest, differing, now))


def lowest_loss(client: Client, job_id: str) -> float | None:
    """The lowest test loss there was, of `MOST_SCORES` versions at most; None where none was scored."""
    series = client.metrics(job_id, points=MOST_SCORES)["test_loss"]
    return min((point["value"] for point in series), default=None)


def outcome(job: Job, lowest: float | None, now: datetime) -> dict[str, Any]:
    """What came of a job, and its lowest test loss; seconds, bytes, fractions."""
    return {
        "id": job["id"],
        "title": job.get("title") or job["name"],
        "status": job["status"],
        "version": job["version"],
        "rounds_total": job["rounds_total"],
        "best_accuracy": job.get("best_accuracy"),
        "best_version": job["best_version"],
        "accuracy": job["accuracy"],
        "lowest_test_loss": lowest,
        "loss": job["loss"],
        "bytes_up": job["bytes_up"],
        "bytes_down": job["bytes_down"],
        "accepted": job["accepted"],
        "dropped": sum(uncounted(job).values()),
        "seconds": elapsed_s(job, now),
    }


def side_by_side(
    jobs: Sequence[Job], lowest: Sequence[float | None], differing: Mapping[str, Sequence[Any]], now: datetime
) -> Table:
    """Jobs, one a column: what came of them, each one's `lowest` test loss too, then the fields that differ."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="bold", no_wrap=True)
    for job in jobs:
        table.add_column(Text(plain(job["id"])), overflow="fold")
    best = [f" at {job['best_version']}" if job["best_version"] else "" for job in jobs]
    rows: dict[str, list[str | Text]] = {
        "Name": [title(job) for job in jobs],
        "State": [status(job) for job in jobs],
        "Version": [f"{job['version']}/{job['rounds_total']}" for job in jobs],
        "Best": [percent(job.get("best_accuracy")) + at for job, at in zip(jobs, best, strict=True)],
        "Last": [percent(job["accuracy"]) for job in jobs],
        "Lowest test loss": [number(loss) for loss in lowest],
        "Loss": [number(job["loss"]) for job in jobs],
        "Up": [size(job["bytes_up"]) for job in jobs],
        "Down": [size(job["bytes_down"]) for job in jobs],
        "Dropped": [_dropped(job) for job in jobs],
        "Time": [duration(elapsed_s(job, now)) for job in jobs],
    }
    rows |= {plain(path): [_value(value) for value in values] for path, values in differing.items()}
    for name, cells in rows.items():
        table.add_row(Text(name), *(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def _dropped(job: Job) -> str:
    """How many of a job's submissions did not count, of how many."""
    found = sum(uncounted(job).values())
    return f"{found:,} of {found + job['accepted']:,}"


def _value(value: object) -> str:
    return NOTHING if value is None else plain(value if isinstance(value, str) else json.dumps(value))
