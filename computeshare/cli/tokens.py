"""`computeshare tokens` and `computeshare audit`: who may do what, and who did what."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, Yes, confirm, connect, token_names
from computeshare.client.api.models import Problem
from computeshare.terminal.output import NOTHING, age, console, parse_time, plain, print_json

app = typer.Typer(no_args_is_help=True, help="Give others access: make, list and revoke tokens.")
SCOPES = ("jobs:read", "jobs:write", "workers:read", "workers:join", "admin")
Limit = Annotated[int, typer.Option(min=1, help="Most entries to list.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is, or what for.", show_default=False)],
    scope: Annotated[
        list[str],
        typer.Option(
            help=f"What it allows: {', '.join(SCOPES)}. May be repeated.",
            autocompletion=lambda: list(SCOPES),
        ),
    ],
    days: Annotated[int, typer.Option(min=0, max=3650, help="Days until it expires; 0: it never does.")] = 90,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a token. Prints it and its login link, which are not shown again."""
    with connect(url, home) as client:
        made = client.access.create_token(name, scope, days or None)
    if as_json:
        print_json(made)
        return
    console().print(f"token   {plain(made['token'])}", markup=False, soft_wrap=True)
    console().print(f"log in  {plain(made['login_url'])}", markup=False, soft_wrap=True)
    console(stderr=True).print("copy what you need: it is shown only once", markup=False)


@app.command("list")
def list_tokens(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List tokens, newest first, without the owner's own."""
    with connect(url, home) as client:
        found = client.access.tokens()
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(_table(found, datetime.now(UTC)))
    else:
        console().print("no tokens here; make one: computeshare tokens create NAME --scope jobs:read", markup=False)


@app.command()
def revoke(
    token: Annotated[
        str,
        typer.Argument(metavar="TOKEN", help="The token's name or id.", show_default=False, autocompletion=token_names),
    ],
    yes: Yes = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Revoke a token: it is refused at once, and browsers that logged in with it are logged out."""
    with connect(url, home) as client:
        found = token_id(client.access.tokens(), token)
        confirm(lambda: f"Revoke the token of {plain(token)}?", yes)
        client.access.revoke_token(found)
    if as_json:
        print_json({"id": found, "revoked": True})
    else:
        console().print(f"revoked {plain(token)}", markup=False)


def audit(
    actor: Annotated[str | None, typer.Option(help="Only changes by the token of this name.")] = None,
    action: Annotated[str | None, typer.Option(help="Only changes of this kind: job.cancel, token.create, ...")] = None,
    subject: Annotated[str | None, typer.Option(help="Only changes of the job, worker or token with this id.")] = None,
    limit: Limit = 50,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List who changed what in the last 90 days, newest first."""
    with connect(url, home) as client:
        found = list(client.access.audit(actor, action, subject, limit))
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(_log(found))
    else:
        console().print("no entries", markup=False)


def token_id(tokens: Sequence[dict[str, Any]], token: str) -> str:
    """The id of the token with this id or name. Raises Problem."""
    for one in tokens:
        if token in (one["id"], one["name"]):
            return str(one["id"])
    raise Problem(f"there is no token {token}: `computeshare tokens list` lists all", 404)


def _table(tokens: Sequence[dict[str, Any]], now: datetime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Token", "Name", "Scopes", "Expires", "Last use", "Created by"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "Token")
    for one in tokens:
        until = parse_time(one["expires_at"])
        expires = "expired" if one["expired"] else f"{until.astimezone():%Y-%m-%d}" if until else "never"
        used = f"{age(one['used_at'], now)} ago" if one["used_at"] else NOTHING
        values = (one["id"], one["name"], ", ".join(one["scopes"]), expires, used, one["created_by"])
        table.add_row(*(Text(plain(value)) for value in values))
    return table


def _log(entries: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("When", "Who", "Action", "Subject", "Details", "Address"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "When")
    for one in entries:
        at = parse_time(one["at"])
        when = f"{at.astimezone():%Y-%m-%d %H:%M:%S}" if at else NOTHING
        detail = ", ".join(f"{name}: {value}" for name, value in one["detail"].items())
        values = (when, one["actor"], one["action"], one["subject"] or NOTHING, detail, one["address"])
        table.add_row(*(Text(plain(value)) for value in values))
    return table
