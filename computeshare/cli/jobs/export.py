"""`computeshare jobs export`."""

import csv
import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from computeshare.cli.connection import Home, JobId, Url, connect, keep_existing
from computeshare.client import Client, Metrics
from computeshare.client.api.models import Submission
from computeshare.errors import ArtifactError
from computeshare.terminal.output import target

VERSIONS_AT_ONCE = 1000
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that a spreadsheet would run as a formula."""
SUBMISSION_COLUMNS = (
    "id", "at", "worker", "outcome", "reason", "base_version", "current_version", "micro_batches", "samples",
    "bytes_up", "bytes_down", "waiting_s", "computing_s", "encoding_s", "uploading_s", "voided",
)  # fmt: skip


def export(
    form: Annotated[Literal["csv", "json"], typer.Argument(metavar="csv|json", help="Format of the file.")],
    job_id: JobId,
    submissions: Annotated[
        bool, typer.Option("--submissions", help="Write the workers' submissions, newest first, instead of the series.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="File to write. Default: standard output."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing file.")] = False,
    url: Url = None,
    home: Home = None,
) -> None:
    """Write a job's series, with a row for each version, or its submissions.

    computeshare jobs export csv ab12cd34 -o ab12cd34.csv
    """
    path = target(output, f"{job_id}.{form}") if output else None
    if path:
        keep_existing(path, force)
    with connect(url, home) as client:
        client.show(job_id)  # before a file is begun
        rows = map(submission_row, client.submissions(job_id, None)) if submissions else series_rows(client, job_id)
        with open_output(path) as file:
            if form == "json":
                write_json(file, rows)
            elif submissions:
                write_csv(file, SUBMISSION_COLUMNS, rows)
            else:
                file.write(client.metrics_csv(job_id))  # one form of the file, whoever asks for it


def series_rows(client: Client, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each version, ascending, up to the newest at the start; fetch `VERSIONS_AT_ONCE` at a time."""
    newest = client.show(job_id)["version"]
    for since in range(0, newest, VERSIONS_AT_ONCE):
        page = client.metrics(job_id, since, min(newest, since + VERSIONS_AT_ONCE), VERSIONS_AT_ONCE)
        for row in Metrics.of(page).rows():
            yield {**row, "at": row["at"].isoformat()}


def submission_row(submission: Submission) -> dict[str, Any]:
    """A submission as a row, with its seconds as columns such as `waiting_s`."""
    flat = {**submission, **{f"{name}_s": value for name, value in submission["seconds"].items()}}
    return {name: flat.get(name) for name in SUBMISSION_COLUMNS}


def write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as CSV with a header line."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in columns])


def write_json(file: TextIO, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as one JSON array, with an object on each line."""
    before = "[\n"
    for row in rows:
        file.write(before + json.dumps(row))
        before = ",\n"
    file.write("[]\n" if before == "[\n" else "\n]\n")


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Open `path`, which is replaced when the block ends; without a path, standard output. Raises ArtifactError."""
    if path is None:
        yield sys.stdout
        return
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _cell(value: object) -> object:
    """A value for a cell; an apostrophe keeps a spreadsheet from running text as a formula."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
