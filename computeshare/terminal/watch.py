"""Watching a job: a live bar in a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NoReturn, cast

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from computeshare.client import Client
from computeshare.client.api.models import Event, Job, quality, tested, trouble
from computeshare.client.event_thread import Follower
from computeshare.terminal.command import DETACHED, FAILED
from computeshare.terminal.output import console, duration, elapsed, number, plain, print_json, status, title
from computeshare.types import ENDED

LINE_EVERY_S = 5.0
_TICK_S = 0.25

Show = Callable[[Job, str], None]
"""Shows a job with a note, which may be empty."""


def watch_job(client: Client, job_id: str, stop: threading.Event | None = None, screen: Console | None = None) -> Job:
    """Show a job's progress until the job has ended or `stop` is set; returns the last known state of the job.

    Lost connections are reopened. Watching never changes the job, which goes on when the watching ends.
    Args:
        screen: the console to show it on; default: standard error.
    Raises: NoServer, Problem.
    """
    job = client.show(job_id)
    screen = screen or console(stderr=True)
    detached = stop or threading.Event()
    with (
        Follower(client, job) as events,
        live_bar(screen) if screen.is_terminal else plain_lines(screen) as show,
    ):
        seen, note = job, ""
        while not detached.is_set():
            show(seen, note)
            event = events.next(_TICK_S)
            if event == "end":
                seen = client.show(job_id)
                show(seen, "")
                break
            if event is not None and event.type in ("job", "lost"):
                seen, note = _apply(event, seen), _note(event)
    return seen


def _apply(event: Event, job: Job) -> Job:
    return cast(Job, {**job, **event.data}) if event.type == "job" else job


def _note(event: Event) -> str:
    return f"reconnecting: {plain(event.data['reason'])}" if event.type == "lost" else ""


@contextmanager
def live_bar(screen: Console) -> Iterator[Show]:
    """A live bar with the job's figures below it."""
    with Live(console=screen, refresh_per_second=4) as live:
        yield lambda job, note: live.update(bar(job, note, datetime.now(UTC)))


@contextmanager
def plain_lines(
    screen: Console, every_s: float = LINE_EVERY_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[Show]:
    """Print a line at every change of state, and every few seconds while there is progress."""
    state, version, due_s = ("", ""), -1, 0.0

    def show(job: Job, note: str) -> None:
        nonlocal state, version, due_s
        current = (job["status"], note or job["reason"] or "")
        if current != state or (job["version"] != version and clock() >= due_s):
            state, version, due_s = current, job["version"], clock() + every_s
            screen.print(Text(line(job, note)), soft_wrap=True)

    yield show


def line(job: Job, note: str = "") -> str:
    """A job's progress on one line."""
    parts = [plain(job["status"]), f"{job['version']}/{job['rounds_total']}", *figures(job)]
    if told := note or trouble(job):
        parts.append(plain(told))
    return "  ".join(parts)


def figures(job: Job) -> list[str]:
    """A job's known figures besides the version: loss, score, samples per second, workers, time left."""
    found = []
    if job["loss"] is not None:
        found.append(f"loss {number(job['loss'])}")
    if score := quality(job):
        found.append(score)
    if score := tested(job):
        found.append(score)
    if job["status"] not in ENDED:
        found.append(f"{job['samples_per_s']:,.0f} samples/s")
        found.append(f"{job['workers']} worker{'' if job['workers'] == 1 else 's'}")
    if (left := job.get("left_s")) is not None:
        found.append(f"{duration(left)} left")
    return found


def bar(job: Job, note: str, now: datetime) -> RenderableType:
    """A job's progress as a few lines of a terminal."""
    head = Text.assemble((title(job), "bold"), "  ", (plain(job["id"]), "dim"), "  ", status(job))
    done = job["version"] / max(1, job["rounds_total"])
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    version = f"{100 * done:3.0f} %  {job['version']} of {job['rounds_total']}"
    grid.add_row(ProgressBar(total=max(1, job["rounds_total"]), completed=job["version"]), Text(version))
    told = note or trouble(job) or ""
    shown = [*figures(job), f"{elapsed(job, now)} elapsed"] if job["started_at"] else figures(job)
    lines: list[RenderableType] = [head, grid, Text("  ".join(shown))]
    if told:
        lines.append(Text(plain(told), "red" if job["error"] else "yellow"))
    return Group(*lines)


def follow_to_end(client: Client, job_id: str, as_json: bool) -> NoReturn:
    """Watch a job, then exit with 0 if it completed, 1 if not, or 130 after Ctrl-C, which does not affect the job."""
    try:
        job = watch_job(client, job_id, screen=console(stderr=as_json))
    except KeyboardInterrupt:
        print(f"detached, the job continues; come back: computeshare jobs watch {plain(job_id)}", file=sys.stderr)
        raise typer.Exit(DETACHED) from None
    if as_json:
        print_json(job)
    raise typer.Exit(0 if job["status"] == "completed" else FAILED)
