"""`computeshare workers`: list, invite, drain and remove workers."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, Worker, Yes, confirm, connect, queues
from computeshare.client.api.models import Problem
from computeshare.terminal.output import NOTHING, age, console, how_to_help, parse_time, plain, print_json, size

app = typer.Typer(no_args_is_help=True, help="See workers; invite, drain and remove them.")


@app.command("list")
def list_workers(
    offline: Annotated[bool, typer.Option("--offline", help="List offline workers, too.")] = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the workers that are online."""
    with connect(url, home) as client:
        found = client.fleet(offline)
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(worker_table(found, datetime.now(UTC)))
    else:
        console().print(f"no workers are online; start one: {how_to_help('default')}", markup=False)


@app.command()
def contributions(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show what each person has contributed to all jobs, and each of their machines."""
    with connect(url, home) as client:
        found = client.contributions()
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Person, machine", overflow="fold")
    for heading in ("Share", "Samples", "Hours", "Jobs"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, one: dict[str, Any], style: str = "") -> None:
        counted = (f"{one['samples']:,}", f"{one['hours']:,.1f}", str(one["jobs"]))
        table.add_row(Text(plain(name)), f"{100 * one['share']:.0f} %", *counted, style=style)

    for person in found["people"]:
        add(person["person"] or "no name given", person, "bold")
        for machine in found["items"]:
            if machine["person"] == person["person"]:
                add(f"  {machine['name']}", machine)
    console().print(table)


@app.command()
def drain(worker: Worker, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Give a worker no more work, even after a restart, until it is undrained. It finishes its work unit first."""
    with connect(url, home) as client:
        _tell(client.drain(worker_id(client.fleet(offline=True), worker)), "gets no more work", as_json)


@app.command()
def undrain(worker: Worker, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Give a drained worker work again."""
    with connect(url, home) as client:
        _tell(client.undrain(worker_id(client.fleet(offline=True), worker)), "may work again", as_json)


@app.command()
def person(
    worker: Worker,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Whose it is. Default: the owner's, or nobody's by name if the machine was invited.",
            show_default=False,
        ),
    ] = "",
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Say whose a worker's machine is. What it has contributed so far counts as theirs, too."""
    with connect(url, home) as client:
        changed = client.assign(worker_id(client.fleet(offline=True), worker), name or None)
    _tell(changed, f"belongs to {plain(changed['person'])}" if changed["person"] else "is nobody's by name", as_json)


@app.command()
def remove(
    worker: Worker,
    yes: Yes = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Remove a worker: it finishes its work unit and ends. An offline worker is forgotten."""
    with connect(url, home) as client:
        found = worker_id(client.fleet(offline=True), worker)
        confirm(lambda: f"Remove worker {plain(worker)}? Its process ends after its work unit.", yes)
        client.remove(found)
    if as_json:
        print_json({"id": found, "removed": True})
    else:
        console().print(f"removed {plain(worker)}", markup=False)


@app.command()
def invite(
    queue: Annotated[
        str, typer.Option(help="Queue that the invited worker serves.", autocompletion=queues)
    ] = "default",
    minutes: Annotated[int, typer.Option(min=1, max=1440, help="Minutes until the invite expires.")] = 15,
    days: Annotated[
        int | None, typer.Option(min=1, max=3650, help="Days until the machine's access ends. Default: it does not.")
    ] = None,
    person: Annotated[
        str | None, typer.Option("--for", metavar="NAME", help="For whom it is; `workers contributions` sums by name.")
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Show the invite's link as a QR code, too.")] = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Invite one machine, once. Give --url with the name by which that machine reaches the control plane."""
    with connect(url, home) as client:
        made = client.invites.create(queue, minutes, days, person)
    if as_json:
        print_json(made)
        return
    console().print("\n".join(_obstacle(made) if made["blocked"] else _joining(made)), markup=False, soft_wrap=True)
    if qr and not made["blocked"]:
        import segno

        segno.make(made["url"], micro=False).terminal(compact=True)


@app.command()
def invites(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List invites, and the machines that joined through the gateway with their bytes and the end of their access."""
    with connect(url, home) as client:
        found = client.invites.list()
    if as_json:
        print_json({"items": found})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Invite", "For", "Queue", "Status", "Machine", "Sent", "Received", "Access until"):
        table.add_column(heading, overflow="fold")
    for one in found:
        moved = (size(one["bytes_up"]), size(one["bytes_down"])) if one["gateway"] else (NOTHING, NOTHING)
        ends = parse_time(one["access_ends_at"])
        until = f"{ends.astimezone():%Y-%m-%d %H:%M}" if ends else NOTHING
        names = [Text(plain(one.get(field) or NOTHING)) for field in ("person", "worker")]
        table.add_row(one["id"], names[0], one["queue"], one["status"], names[1], *moved, until)
    console().print(table)


@app.command()
def withdraw(
    invite_id: Annotated[str, typer.Argument(metavar="INVITE", help="The invite's id, from `workers invites`.")],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Withdraw an invite, and cut off the machine that joined by it through the gateway."""
    with connect(url, home) as client:
        client.invites.withdraw(invite_id)
    if as_json:
        print_json({"id": invite_id, "withdrawn": True})
    else:
        console().print(f"withdrew {plain(invite_id)}", markup=False)


def worker_id(workers: Sequence[dict[str, Any]], worker: str) -> str:
    """The id of the worker with this id, or with this name if the name is unique. Raises Problem."""
    if any(worker == one["id"] for one in workers):
        return worker
    named = [str(one["id"]) for one in workers if worker == one["name"]]
    if len(named) > 1:
        raise Problem(f"{len(named)} workers are named {worker}; give an id: {', '.join(named)}", 409)
    if not named:
        raise Problem(f"there is no worker {worker}: computeshare workers list --offline shows them", 404)
    return named[0]


def state(worker: dict[str, Any]) -> str:
    """A worker's state in a few words."""
    power = worker.get("power") or {}
    battery = f", {power['percent']:.0f} %" if power.get("percent") is not None else ""
    for applies, word in (
        (not worker["online"], "offline, drained" if worker["drained"] else "offline"),
        (worker["refused"], "refused"),
        (worker["leaving"], "leaving"),
        (worker["drained"], "drained"),
        (worker.get("resting"), f"resting: {worker.get('resting')}"),
        (worker["job_id"], "at work"),
        (worker.get("left_out"), f"idle: {'; '.join(worker.get('left_out') or [])}"),
    ):
        if applies:
            return plain(word + battery)
    return f"idle{battery}"


def recipes(worker: dict[str, Any]) -> str:
    """Which recipes a worker runs, and by what they are confined."""
    if not (digests := worker.get("recipes")):
        return NOTHING
    confinement = worker.get("confinement") or "none"
    return f"{'all' if '*' in digests else len(digests)}, {'not confined' if confinement == 'none' else confinement}"


def worker_table(workers: Sequence[dict[str, Any]], now: datetime) -> Table:
    """A table with a row for each worker."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Worker", "Name", "Device", "State", "Job", "Queues", "Labels", "Recipes"):
        table.add_column(heading, overflow="fold")
    for heading in ("Memory", "Samples/s", "Share", "Last seen"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(
            Text(plain(worker["id"])),
            Text(plain(worker["name"])),
            Text(plain(worker["device"])),
            Text(state(worker)),
            Text(plain(worker["job_id"] or NOTHING)),
            Text(plain(", ".join(worker["queues"]))),
            Text(plain(", ".join(f"{name}={value}" for name, value in worker.get("labels", {}).items()) or NOTHING)),
            Text(plain(recipes(worker))),
            size(worker["memory_bytes"]),
            f"{worker['samples_per_s']:,.0f}" if worker["job_id"] else NOTHING,
            f"{100 * worker['share']:.0f} %",
            f"{age(worker['last_seen'], now)} ago",
        )
    return table


def _obstacle(made: dict[str, Any]) -> list[str]:
    """Why nobody could join by an invite, and the command that changes it: the lines to join by would be useless."""
    remedy = [plain(made["remedy"])] if made.get("remedy") else []
    return [f"no other machine can join yet: {plain(made['note'])}", *remedy]


def _joining(made: dict[str, Any]) -> list[str]:
    until = parse_time(made["expires_at"])
    when = f" until {until.astimezone():%Y-%m-%d %H:%M}" if until else ""
    with_uv, with_pipx = map(plain, made["new_machine"])
    return [
        with_uv,
        f"run this on the other machine, which needs uv and nothing else; the link works once{when}",
        f"with pipx: {with_pipx}",
        f"where ComputeShare is installed: {plain(made['command'])}",
        *([f"warning: {plain(made['note'])}"] if made["note"] else []),
    ]


def _tell(worker: dict[str, Any], what: str, as_json: bool) -> None:
    if as_json:
        print_json(worker)
    else:
        console().print(f"{plain(worker['name'] or worker['id'])} {what}", markup=False)
