"""Formats values, jobs and documents for a terminal. Pure, except for `console` and `print_json`.

Texts from a control plane may hold anything: they are shown as plain text, never as markup or control sequences.
"""

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from rich import filesize
from rich.console import Console
from rich.table import Table
from rich.text import Text

from computeshare import types
from computeshare.client.api.models import ICONS, ComparedJob, Job, tested
from computeshare.jobspec.tasks.stored import subject_of

NOTHING = "–"
plain = types.plain
_PIPE_WIDTH = 200
_STYLES = {
    "queued": "yellow",
    "running": "cyan",
    "paused": "yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "dim",
}
_FOUND = ("recipe_facts", "data")
"""Fields of a JobSpec that were found out when the job was created: long, and `--json` has them."""


def console(stderr: bool = False) -> Console:
    """A console on standard output or standard error; into a pipe, lines are 200 characters wide."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def print_json(document: object) -> None:
    """Print one JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def how_to_help(queue: str) -> str:
    """The command that starts one more worker for a queue, here and elsewhere."""
    name = shlex.quote(plain(queue))
    return f"here computeshare-worker --queue {name}, elsewhere what computeshare workers invite --queue {name} prints"


def title(job: Job) -> str:
    """The job's title, else its name, else its model and data set."""
    return plain(job.get("title") or job["name"] or subject_of(job["spec"]))


def status(job: Job | ComparedJob) -> Text:
    """The job's state as icon and word."""
    return Text(f"{ICONS.get(job['status'], '?')} {plain(job['status'])}", _STYLES.get(job["status"], ""))


def number(value: float | None, digits: int = 4) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{100 * fraction:.2f} %"


def size(count: int) -> str:
    return filesize.decimal(count)


def duration(seconds: float | None) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None:
        return NOTHING
    total = max(0, round(seconds))
    for unit, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= unit:
            return f"{total // unit} {name} {total % unit // below} {below_name}"
    return f"{total} s"


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time from the API, as UTC if it has no zone; None if it cannot be parsed."""
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str | None, now: datetime) -> str:
    """The time that has passed since an ISO 8601 time from the API."""
    moment = parse_time(text)
    return duration((now - moment).total_seconds() if moment else None)


def elapsed(job: Job, now: datetime) -> str:
    """The job's running time so far or in all, without its pauses."""
    started = parse_time(job["started_at"])
    if started is None:
        return duration(None)
    until = parse_time(job["finished_at"]) or parse_time(job.get("paused_at")) or now
    return duration((until - started).total_seconds() - job.get("stopped_s", 0.0))


def job_table(jobs: list[Job], now: datetime) -> Table:
    """A table with a row for each job."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Job", "Name", "State", "Queue"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    is_tested = any(job.get("tested") for job in jobs)
    for heading in ("Version", "Loss", "Accuracy", *(["Test"] if is_tested else []), "Workers", "Age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for job in jobs:
        table.add_row(
            Text(plain(job["id"])),
            Text(f"{title(job)} ({plain(notes)})" if (notes := job["spec"].get("notes")) else title(job)),
            status(job),
            Text(plain(job["queue"])),
            f"{job['version']}/{job['rounds_total']}",
            number(job["loss"]),
            _short_score(job),
            *([tested_score(job)] if is_tested else []),
            str(job["workers"]),
            age(job["created_at"], now),
        )
    return table


def job_details(job: Job, page: str, now: datetime) -> Table:
    """A table of one job with a row for each fact, errors first."""
    rows: list[tuple[str, Any]] = [("Job", Text.assemble(plain(job["id"]), "  ", status(job)))]
    if job["error"]:
        sentence, _, trace = job["error"].partition("\n\n")
        rows.append(("Error", Text("\n".join(map(plain, sentence.splitlines())), "red")))
        if trace:
            rows.append(("Traceback", f"computeshare jobs logs {plain(job['id'])} --level error"))
    if job["reason"]:
        rows.append(("Reason", plain(job["reason"])))
    rows.append(("Name", title(job)))
    if notes := job["spec"].get("notes"):
        rows.append(("Notes", Text("\n".join(map(plain, notes.splitlines())))))
    if origin := job.get("forked_from"):
        told = f"version {origin['version']} of job {origin['job_id']}, with {origin['optimizer']} optimizer"
        rows.append(("Forked from", plain(told)))
    rows += [
        ("Page", plain(page)),
        ("Queue", f"{plain(job['queue'])}, priority {job.get('priority', 0)}"),
        ("Version", f"{job['version']} of {job['rounds_total']}, {job['durable_version']} durable"),
        ("Epoch", f"{job['epoch'] + 1} of {job.get('epochs_total', NOTHING)}"),
        ("Loss", number(job["loss"])),
        _score(job),
        *([("Test set", score.removeprefix("test "))] if (score := tested(job)) else []),
        ("Workers", f"{job['workers']}, together {job['samples_per_s']:,.0f} samples/s" if job["workers"] else "none"),
        ("Elapsed", elapsed(job, now)),
        ("Left", duration(job.get("left_s"))),
        ("Submissions", submissions(job)),
        *([("Audits", f"{sent:,}, {job.get('confirmed', 0):,} confirmed")] if (sent := job.get("audited", 0)) else []),
        ("Traffic", f"{size(job['bytes_up'])} up, {size(job['bytes_down'])} down"),
        ("Weights", plain(job["weights_sha256"] or NOTHING)),
        *([("Privacy", privacy(job))] if job["spec"].get("privacy") else []),
        ("Spec", plain(json.dumps({name: value for name, value in job["spec"].items() if name not in _FOUND}))),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)
    return table


def privacy(job: Job) -> str:
    """A private job's epsilon, so far and at its end, and its delta, as text."""
    values = (job.get("epsilon"), job.get("epsilon_total"))
    so_far, in_all = ("above 1,000" if value is None else f"{value:.3g}" for value in values)
    return f"epsilon {so_far} so far, {in_all} at the end, delta {job['spec']['privacy']['delta']:g}"


def best(job: Job | ComparedJob) -> str:
    """The accuracy, or the test loss, of the job's best version."""
    if job.get("metric") == "loss":
        return number(job.get("best_loss")) + _nats(job) if job.get("best_loss") is not None else NOTHING
    return percent(job.get("best_accuracy"))


def tested_score(job: Job | ComparedJob) -> str:
    """The accuracy, or the loss, of the job's best version on the test set, where versions are compared on another."""
    if not (found := job.get("tested")):
        return NOTHING
    return percent(found["accuracy"]) if found["accuracy"] is not None else number(found["loss"]) + _nats(job)


def _short_score(job: Job) -> str:
    if job.get("metric") == "loss" and (loss := job.get("test_loss")) is not None:
        told = f"{loss:.4f}{_nats(job)}"
        return f"{told}, perplexity {number(job.get('perplexity'), 2)}" if _nats(job) else told
    return percent(job["accuracy"])


def _nats(job: Job | ComparedJob) -> str:
    """The unit of a language model's losses; none for other models."""
    return " nats" if job.get("perplexity") is not None else ""


def _score(job: Job) -> tuple[str, str]:
    part = "Validation" if job["spec"].get("validation") else "Test"
    name = f"{part} loss" if job.get("metric") == "loss" else "Accuracy"
    return name, _short_score(job) + (f", best {best(job)} at {job['best_version']}" if job["best_version"] else "")


def submissions(job: Job) -> str:
    """The counts of a job's submissions by outcome; rare outcomes are left out if zero."""
    told = cast(dict[str, Any], job)
    found = [(outcome, told.get(outcome, 0)) for outcome in get_args(types.Outcome)]
    shown = [one for one in found if one[1] or one[0] in ("accepted", "stale", "duplicate")]
    return ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in shown)


def target(output: Path | None, name: str) -> Path:
    """The file to write: `output`, or `name` inside it if it is a folder; `name` in the current folder by default."""
    if output is None:
        return Path(name)
    return output / name if output.is_dir() else output
