"""The commands of a machine's owner: `computeshare-worker status` and `computeshare-worker stop`."""

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from computeshare.errors import SettingsError
from computeshare.settings import Settings
from computeshare.terminal.output import console, duration, plain, print_json, size
from computeshare.worker.status_file import CurrentJob, Running, WorkerLimits, WorkerStatus, read_totals

Home = Annotated[Path | None, typer.Option(metavar="DIR", help="The workers' folder. Default: COMPUTESHARE_HOME.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def status(home: Home = None, as_json: Json = False) -> None:
    """Show what runs on this machine, for whom, within which limits, and what was sent and received."""
    folder = Settings.given(home=home).home
    found, totals = [one.status for one in Running.all(folder)], read_totals(folder)
    if as_json:
        print_json({"workers": [one.model_dump() for one in found], "total": totals.model_dump()})
        return
    if not found:
        console().print(f"No worker runs here (home: {folder}).", markup=False, soft_wrap=True)
    for one in found:
        console().print(_table(one, time.time()))
    if totals.since:
        since = f"{datetime.fromtimestamp(totals.since):%Y-%m-%d %H:%M}"
        moved = f"sent {size(totals.bytes_up)}, received {size(totals.bytes_down)}"
        console().print(f"All workers since {since}: {moved} (up to a few seconds ago)", markup=False)


def stop(
    worker: Annotated[str | None, typer.Argument(help="Its name, id or process id. Default: the only one.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Stop all workers of this home.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not finish the work unit.")] = False,
    home: Home = None,
) -> None:
    """Stop a worker on this machine for good: it finishes its work unit and hands its seat back."""
    running = [one for one in Running.all(Settings.given(home=home).home) if one.status.state != "ended"]
    chosen = running if everyone else _chosen(running, worker)
    for one in chosen:
        one.ask_to_stop(now)
    for one in chosen:
        one.wait()
        console().print(f"stopped {plain(one.status.name)}", markup=False)


def _chosen(running: list[Running], worker: str | None) -> list[Running]:
    """The one worker that is meant. Raises SettingsError: none or several are."""
    meant = [one for one in running if worker in (None, one.status.name, one.status.id, str(one.status.pid))]
    if len(meant) == 1:
        return meant
    known = ", ".join(f"{plain(one.status.name)} (process {one.status.pid})" for one in running)
    if not running:
        raise SettingsError("no worker runs here")
    raise SettingsError(f"name one of the workers that run here, or give --all: {known}")


def _table(one: WorkerStatus, now: float) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(plain(one.name), _activity(one), style="bold")
    for title, text in _rows(one, now):
        if text:
            table.add_row(title, plain(text))
    return table


def _activity(one: WorkerStatus) -> str:
    if one.job:
        reached = f", version {one.job.version:,} of {one.job.rounds:,}" if one.job.rounds else ""
        creator = f", created by {one.job.creator}" if one.job.creator else ""
        return plain(f"trains {one.job.name or 'a job'} (job {one.job.id}{creator}){reached}")
    words = {
        "connecting": "has not reached the control plane yet",
        "resting": f"rests: {one.resting}",
        "ended": "has ended without a goodbye: it was killed or shut out, or the machine was switched off",
    }
    return plain(words.get(one.state, "waits for a job"))


def _rows(one: WorkerStatus, now: float) -> list[tuple[str, str]]:
    invite = f", by invite {one.invite}" if one.invite else ""
    heard = f"; last heard of {duration(max(0.0, now - one.heard))} ago" if one.heard else ""
    begun = f"{datetime.fromtimestamp(one.began):%Y-%m-%d %H:%M}"
    confined = f"confined by {one.confinement}" if one.confinement else "not confined"
    agreed = "all that the control plane has signed" if "*" in one.recipes else ", ".join(one.recipes)
    return [
        ("for", f"{one.control_plane}{invite}; queues {', '.join(one.queues)}{heard}"),
        ("recipe", f"{one.job.recipe}, {confined}" if one.job and one.job.recipe else ""),
        ("recipes", f"{agreed}, {confined}" if agreed else "none run here: only models that ComputeShare knows"),
        ("limits", _limits(one.limits)),
        ("upgrades", "installs the control plane's version when its own does not fit" if one.upgrades else ""),
        ("devices", _devices(one.job)),
        ("traffic", f"sent {size(one.moved.bytes_up)}, received {size(one.moved.bytes_down)} since its start"),
        ("process", f"{one.pid} (id {one.id}), on {one.device}, since {begun}"),
    ]


def _devices(job: CurrentJob | None) -> str:
    """The units that each of several devices has computed for the current job."""
    if job is None or len(job.units) < 2:
        return ""
    counts = (
        f"number {place}: {units:,} units{', stopped by an error' if place in job.stopped else ''}"
        for place, units in enumerate(job.units)
    )
    return "; ".join(counts)


def _limits(limits: WorkerLimits) -> str:
    found = [
        f"upload {limits.max_up}" if limits.max_up else "upload unlimited",
        f"memory {limits.max_memory}" if limits.max_memory else "memory unlimited",
        f"CPU priority {limits.nice}" if limits.nice else "",
        f"hours {', '.join(limits.hours)}" if limits.hours else "at any hour",
        "only on power" if limits.only_on_power else "",
        f"rests below {limits.battery_stop:g} % of the battery" if limits.battery_stop is not None else "",
        f"fetched data {limits.cache}" if limits.cache else "",
    ]
    return "; ".join(filter(None, found))
