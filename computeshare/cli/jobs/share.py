"""`computeshare jobs share|links|unshare`: read-only links to a job's page."""

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, JobId, Json, Url, connect
from computeshare.terminal.output import NOTHING, age, console, parse_time, plain, print_json


def share(
    job_id: JobId,
    days: Annotated[int, typer.Option(min=0, max=3650, help="Days until the link expires; 0: it never does.")] = 30,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a link that shows this job's page, and nothing else, to whoever has it. It is not shown again."""
    with connect(url, home) as client:
        made = client.access.create_link(job_id, days or None)
    if as_json:
        print_json(made)
        return
    console().print(plain(made["url"]), markup=False, soft_wrap=True)
    revoke = f"to revoke it: computeshare jobs unshare {plain(job_id)} {plain(made['id'])}"
    console(stderr=True).print(revoke, markup=False, soft_wrap=True)


def links(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List the read-only links to a job, newest first."""
    with connect(url, home) as client:
        found = client.access.links(job_id)
    if as_json:
        print_json({"items": found})
        return
    if not found:
        console().print(f"no links here; make one: computeshare jobs share {plain(job_id)}", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Link", "Expires", "Last use", "Created by"):
        table.add_column(heading, overflow="fold")
    now = datetime.now(UTC)
    for one in found:
        until = parse_time(one["expires_at"])
        expires = "expired" if one["expired"] else f"{until.astimezone():%Y-%m-%d}" if until else "never"
        used = f"{age(one['used_at'], now)} ago" if one["used_at"] else NOTHING
        table.add_row(*(Text(plain(value)) for value in (one["id"], expires, used, one["created_by"])))
    console().print(table)


def unshare(
    job_id: JobId,
    link: Annotated[str, typer.Argument(metavar="LINK", help="The link's id.", show_default=False)],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Revoke a read-only link: it shows nothing from now on."""
    with connect(url, home) as client:
        client.access.revoke_link(job_id, link)
    if as_json:
        print_json({"id": link, "revoked": True})
    else:
        console().print(f"revoked {plain(link)}", markup=False)
