"""Which control plane the commands talk to, and the options that all of them take."""

from pathlib import Path
from typing import Annotated

import typer

from computeshare.client import Client, NoServer
from computeshare.errors import SettingsError
from computeshare.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)]
Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Control plane; default COMPUTESHARE_URL, else the one running here.")
]
Home = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of token and run.json; default COMPUTESHARE_HOME.")
]


def settings(url: str | None, home: Path | None) -> Settings:
    """The settings, but for what the flags say."""
    return Settings.given(url=url, home=home)


def connect(url: str | None, home: Path | None) -> Client:
    """A client of the control plane. Raises NoServer where none is known."""
    found = settings(url, home)
    try:
        address = found.resolve_url()
    except SettingsError as error:
        raise NoServer(str(error)) from error
    try:
        token = found.resolve_token()
    except SettingsError:
        token = None  # the control plane refuses, and its answer says what to do
    return Client(address, token)


def page(client: Client, job_id: str) -> str:
    """The address of a job's page."""
    return f"{client.url}/jobs/{job_id}"
