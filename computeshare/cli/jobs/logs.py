"""`computeshare jobs logs`: log lines of a job's workers, reducer and evaluator."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from computeshare.cli.connection import Home, JobId, Url, complete_workers, connect
from computeshare.client import Client
from computeshare.client.api.models import LogLine
from computeshare.errors import SpecError
from computeshare.runtime.log_lines import LEVELS, called, fields_text
from computeshare.terminal.command import DETACHED
from computeshare.terminal.output import console, parse_time, plain, print_json

STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "red"}
_NAME_WIDTH = 16

Worker = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Only lines of the worker with this name or id.",
        show_default=False,
        autocompletion=complete_workers,
    ),
]
AtLeast = Annotated[
    str | None,
    typer.Option("--level", metavar="|".join(LEVELS), help="Only lines of at least this level.", show_default=False),
]


def logs(
    job_id: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they come, until the job ends.")
    ] = False,
    worker: Worker = None,
    level: AtLeast = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of newest lines; 0: all.")] = 100,
    url: Url = None,
    home: Home = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with -f, one for each line.")
    ] = False,
) -> None:
    """Show the log of a job from all its workers, including workers that left. Ctrl-C stops reading, not the job."""
    if level is not None and level not in LEVELS:
        raise SpecError(f"--level {plain(level)}: give one of {', '.join(LEVELS)}")
    with connect(url, home) as client:
        try:
            if follow:
                for line in followed(client, job_id, worker, level, limit or None):
                    print_line(line, as_json)
            else:
                print_lines(list(client.logs(job_id, worker, level, limit or None)), as_json)
        except KeyboardInterrupt:
            print(f"detached, the job continues; come back: computeshare jobs logs -f {plain(job_id)}", file=sys.stderr)
            raise typer.Exit(DETACHED) from None


def followed(
    client: Client, job_id: str, worker: str | None, level: str | None, limit: int | None
) -> Iterator[LogLine]:
    """Yield the newest lines, then new lines as they arrive."""
    last, screen = 0, console(stderr=True)
    for line in client.logs(job_id, worker, level, limit):
        last = line["id"]
        yield line

    def lost(reason: str) -> None:
        screen.print(Text(f"reconnecting: {plain(reason)}", "yellow"), soft_wrap=True)

    yield from client.follow_logs(job_id, worker, level, last, lost)


def print_lines(lines: list[LogLine], as_json: bool) -> None:
    """Print a complete list of lines."""
    if as_json:
        print_json({"items": lines})
        return
    screen = console()
    for line in lines:
        show(line, screen)
    if not lines:
        console(stderr=True).print("no lines in this log", markup=False)


def print_line(line: LogLine, as_json: bool) -> None:
    """Print one line immediately."""
    if as_json:
        print(json.dumps(line), flush=True)
    else:
        show(line, console())


def show(line: LogLine, screen: Console) -> None:
    """Print time, worker, level, text and fields of a line, and its traceback below."""
    style = STYLES.get(line["level"], "")
    moment = parse_time(line["at"])
    at = moment.astimezone().strftime("%m-%d %H:%M:%S") if moment else plain(line["at"])
    head = f"{at}  {plain(called(line['worker'], line['name'])):<{_NAME_WIDTH}}  {plain(line['level']):<7}  "
    first, *more = line["text"].split("\n") or [""]
    text = Text.assemble((head, "dim"), (plain(first), style))
    if fields := fields_text(line["data"]):
        text.append("  " + plain(fields), "dim")
    trace = str(line["data"].get("exception", "")).split("\n") if "exception" in line["data"] else []
    for below in (*more, *trace):
        text.append("\n    " + plain(below.replace("\t", "    ")), style)
    screen.print(text, soft_wrap=True)
