"""`computeshare status`, `open` and `worker`: what runs here, its pages, and one more worker."""

import html
import os
import sys
import webbrowser
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, connect, job_ids, settings
from computeshare.client import Client
from computeshare.runtime.private_files import write_private
from computeshare.settings import login_path
from computeshare.terminal.output import console, plain, print_json
from computeshare.types import JobStatus

WORKER = "computeshare-worker"
UNDER_WAY: tuple[JobStatus, ...] = ("running", "queued", "paused")
_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={link}"><a href="{link}">ComputeShare</a>\n'
"""The page that a browser is given: other users of this machine could read the link itself among its arguments."""


def status(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show whether the control plane runs, its workers, and the jobs that have not ended."""
    with connect(url, home) as client:
        found = _found(client)
    if as_json:
        print_json(found)
        return
    workers = found["workers"]
    idle = f", {workers['online'] - workers['at_work']} idle" if workers["online"] else ""
    rows = {
        "Control plane": f"{plain(found['url'])}, running",
        "Workers": f"{workers['online']} online{idle}",
        "Jobs": ", ".join(f"{count} {name}" for name, count in found["jobs"].items()) or "none under way",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), Text(value))
    console().print(table)


def _found(client: Client) -> dict[str, Any]:
    """The state of a control plane. Raises NoServer, Problem."""
    workers = client.fleet()
    jobs = Counter(job["status"] for job in client.jobs(UNDER_WAY))
    return {
        "url": client.url,
        "workers": {"online": len(workers), "at_work": sum(bool(one["job_id"]) for one in workers)},
        "jobs": {name: jobs[name] for name in UNDER_WAY if jobs[name]},
    }


def open_pages(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="Open this job's page.", show_default=False, autocompletion=job_ids),
    ] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Open the pages in a browser, logged in, and print the link for where none opens."""
    found = settings(url, home)
    link = found.resolve_url() + login_path(found.resolve_token()) + (f"&next=/jobs/{job_id}" if job_id else "")
    redirect = found.home.resolve() / "open.html"
    write_private(redirect, _REDIRECT.format(link=html.escape(link)))
    started = webbrowser.open(redirect.as_uri())
    if as_json:
        print_json({"url": link, "opened": started})
    else:
        print(link)


def worker(context: typer.Context) -> None:
    """Start a worker on this machine: the same as computeshare-worker, with its options."""
    script = Path(sys.executable).with_name(WORKER)
    own = [str(script)] if script.exists() else [sys.executable, "-m", "computeshare.worker.process"]
    os.execv(own[0], [*own, *context.args])  # noqa: S606 - this package's own command
