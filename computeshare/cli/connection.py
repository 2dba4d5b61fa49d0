"""The commands' connection to the control plane, their common options, and shell completion."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from computeshare.client import Client, reach
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings
from computeshare.terminal.output import plain, title

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Control plane. Default: COMPUTESHARE_URL, else the control plane running here."),
]
Home = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder with token and run.json. Default: COMPUTESHARE_HOME.")
]


COMPLETION_S = 1.0
"""Seconds that shell completion may wait for the control plane."""
_COMPLETIONS = 100
_HARMLESS = re.compile(r"[\w.][\w.-]*", re.ASCII)
Words = list[tuple[str, str]]
"""Completions, each with a description."""


def settings(url: str | None, home: Path | None) -> Settings:
    """The settings, overridden by the flags."""
    return Settings.given(url=url, home=home)


def connect(url: str | None, home: Path | None) -> Client:
    """A client of the control plane. Raises NoServer if no control plane is known."""
    return reach(settings(url, home))


def job_ids(context: typer.Context, incomplete: str) -> Words:
    """Completions: the newest jobs whose ids begin with `incomplete`."""
    return _known(
        context,
        incomplete,
        lambda client: [(job["id"], f"{title(job)}, {job['status']}") for job in client.jobs(limit=_COMPLETIONS)],
    )


def complete_workers(context: typer.Context, incomplete: str) -> Words:
    """Completions: workers by name, or by id where the name is not unique or holds special characters."""

    def ask(client: Client) -> Words:
        found = client.fleet(offline=True)
        times = Counter(one["name"] for one in found)
        own = {name for name, count in times.items() if count == 1 and _HARMLESS.fullmatch(name)}
        return [(one["name"] if one["name"] in own else one["id"], one["device"]) for one in found]

    return _known(context, incomplete, ask)


def webhook_ids(context: typer.Context, incomplete: str) -> Words:
    """Completions: the webhooks whose ids begin with `incomplete`."""
    return _known(context, incomplete, lambda client: [(hook["id"], hook["url"]) for hook in client.webhooks.list()])


def token_names(context: typer.Context, incomplete: str) -> Words:
    """Completions: the tokens whose names begin with `incomplete`."""
    return _known(
        context, incomplete, lambda client: [(one["name"], ", ".join(one["scopes"])) for one in client.access.tokens()]
    )


def dataset_names(context: typer.Context, incomplete: str) -> Words:
    """Completions: the users' data sets whose names begin with `incomplete`."""
    return _known(context, incomplete, lambda client: [(one["name"], one["kind"]) for one in client.datasets.list()])


def queues(context: typer.Context, incomplete: str) -> Words:
    """Completions: the queues whose names begin with `incomplete`."""
    return _known(
        context, incomplete, lambda client: [(one["name"], f"{one['workers']} workers") for one in client.queues()]
    )


def _known(context: typer.Context, incomplete: str, ask: Callable[[Client], Words]) -> Words:
    """The words from `ask` that begin with `incomplete`; none if no control plane answers within `COMPLETION_S`.

    Words with characters that are special to a shell are left out: completion does not quote them.
    """
    given = context.params
    try:
        with reach(settings(given.get("url"), given.get("home")), COMPLETION_S) as client:
            found = ask(client)
    except ComputeShareError:
        return []
    return [(word, plain(told)) for word, told in found if _HARMLESS.fullmatch(word) and word.startswith(incomplete)]


JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False, autocompletion=job_ids)]


def output_option(default: str) -> Any:
    """The option `--output` of a command that writes one file, by default named `default`."""
    told = f"File or folder to write to (default {default})."
    return typer.Option("--output", "-o", metavar="FILE", show_default=False, help=told)


def recipe_code_option(runs: str) -> Any:
    """The option for a recipe's code on this machine; `runs`: how it runs, and other remarks."""
    return typer.Option(
        metavar="PATH",
        show_default=False,
        help="For a job that trains a recipe: your file of it, or `stored` for the control plane's copy; "
        f"runs its code here, {runs}.",
    )


def keep_existing(path: Path, force: bool) -> None:
    """Raises typer.BadParameter: the file to write exists, and `force` does not allow to replace it."""
    if path.exists() and not force:
        message = f"{path} already exists: choose another folder or name, or give --force"
        raise typer.BadParameter(message, param_hint="--output")


Version = Annotated[str, typer.Option(metavar="latest|best|N", help="Version of the job.")]
Worker = Annotated[
    str,
    typer.Argument(
        metavar="WORKER", help="The worker's id or name.", show_default=False, autocompletion=complete_workers
    ),
]


def page_url(client: Client, job_id: str) -> str:
    """The address of a job's page."""
    return f"{client.url}/jobs/{job_id}"


def confirm(question: Callable[[], str], yes: bool) -> None:
    """Ask for confirmation at a terminal, unless `yes`. Raises typer.Abort if the user declines."""
    if sys.stdin.isatty() and not yes:
        typer.confirm(question(), abort=True, err=True)
