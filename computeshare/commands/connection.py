"""Which control plane the commands talk to, and the options that all of them take."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from computeshare.client import Client, reach
from computeshare.commands.output import plain, title
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]
Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Control plane; default COMPUTESHARE_URL, else the one running here.")
]
Home = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of token and run.json; default COMPUTESHARE_HOME.")
]


COMPLETION_S = 1.0
"""How long somebody who pressed the tabulator is kept waiting, in seconds."""
_COMPLETIONS = 100


def settings(url: str | None, home: Path | None) -> Settings:
    """The settings, but for what the flags say."""
    return Settings.given(url=url, home=home)


def connect(url: str | None, home: Path | None) -> Client:
    """A client of the control plane. Raises NoServer where none is known."""
    return reach(settings(url, home))


def job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The newest jobs whose ids begin so, each with what it is called; none where no control plane answers at once."""
    found = context.params
    try:
        with reach(settings(found.get("url"), found.get("home")), COMPLETION_S) as client:
            jobs = list(client.jobs(limit=_COMPLETIONS))
    except ComputeShareError:
        return []
    known = [(plain(job["id"]), f"{title(job)}, {plain(job['status'])}") for job in jobs]
    return [one for one in known if one[0].startswith(incomplete)]


JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False, autocompletion=job_ids)]


def page(client: Client, job_id: str) -> str:
    """The address of a job's page."""
    return f"{client.url}/jobs/{job_id}"


def confirm(question: Callable[[], str], yes: bool) -> None:
    """Ask at a terminal before something is lost, unless the user has said yes. Raises typer.Abort."""
    if sys.stdin.isatty() and not yes:
        typer.confirm(question(), abort=True, err=True)
