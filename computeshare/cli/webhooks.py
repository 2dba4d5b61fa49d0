"""`computeshare webhooks`: notifications about jobs by HTTP POST, and their deliveries."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from computeshare.cli.connection import Home, Json, Url, Yes, confirm, connect, job_ids, queues, webhook_ids
from computeshare.client import Client
from computeshare.terminal.command import FAILED
from computeshare.terminal.output import NOTHING, age, console, plain, print_json

app = typer.Typer(no_args_is_help=True, help="Post notifications to an address.")
Hook = Annotated[
    str,
    typer.Argument(metavar="WEBHOOK", help="The webhook's id.", show_default=False, autocompletion=webhook_ids),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--event", help="Event to post: completed, failed, held, ... May be repeated.", show_default=False),
]
PATIENCE_S = 15.0
_LOOKS = {"delivered": "green", "failed": "red", "pending": "yellow", "dropped": "dim"}
Document = dict[str, Any]


@app.command()
def create(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address to post to.", show_default=False)],
    event: Names = None,
    job: Annotated[
        str | None, typer.Option(help="Only events of this job.", show_default=False, autocompletion=job_ids)
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Only events of jobs on this queue.", show_default=False, autocompletion=queues)
    ] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Post notifications to an address. Prints the secret that signs them, which is not shown again."""
    given = {"url": address, "events": event or None, "job_id": job, "queue": queue}
    with connect(url, home) as client:
        hook = client.webhooks.create({name: value for name, value in given.items() if value is not None})
    if as_json:
        print_json(hook)
        return
    console().print(f"webhook {plain(hook['id'])} receives {plain(', '.join(hook['events']))}", markup=False)
    console().print(f"secret  {plain(hook['secret'])}", markup=False, soft_wrap=True)
    console(stderr=True).print("store the secret with the receiver: it is shown only once", markup=False)


@app.command("list")
def list_webhooks(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """List webhooks, newest first."""
    with connect(url, home) as client:
        hooks = client.webhooks.list()
    if as_json:
        print_json({"items": hooks})
    elif hooks:
        console().print(_table(hooks))
    else:
        console().print("no webhooks here; create one: computeshare webhooks create ADDRESS", markup=False)


@app.command()
def show(hook: Hook, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show one webhook."""
    with connect(url, home) as client:
        found = client.webhooks.show(hook)
    _show(found, as_json)


@app.command()
def test(hook: Hook, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Send a ping, and wait for its delivery."""
    with connect(url, home) as client:
        _report(_outcome(client, hook, client.webhooks.ping(hook)), as_json)


@app.command()
def deliveries(
    hook: Hook,
    limit: Annotated[int, typer.Option(min=1, help="Most deliveries to list.")] = 20,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List deliveries, sent and pending, newest first."""
    with connect(url, home) as client:
        found = list(client.webhooks.deliveries(hook, limit))
    if as_json:
        print_json({"items": found})
    elif found:
        console().print(_log(found))
    else:
        console().print(
            "nothing has been sent yet; send a test event: computeshare webhooks test WEBHOOK", markup=False
        )


@app.command()
def redeliver(
    hook: Hook,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id.", show_default=False)],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Send a notification again under the same id, and wait for its delivery."""
    with connect(url, home) as client:
        _report(_outcome(client, hook, client.webhooks.redeliver(hook, delivery)), as_json)


@app.command()
def enable(hook: Hook, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Switch a webhook on. Events from the time when it was off are not sent."""
    with connect(url, home) as client:
        _show(client.webhooks.change(hook, {"active": True}), as_json)


@app.command()
def disable(hook: Hook, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Switch a webhook off. Pending notifications are dropped."""
    with connect(url, home) as client:
        _show(client.webhooks.change(hook, {"active": False}), as_json)


@app.command()
def delete(
    hook: Hook,
    yes: Yes = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete a webhook and the log of its deliveries."""
    with connect(url, home) as client:
        confirm(lambda: f"Remove the webhook to {plain(client.webhooks.show(hook)['url'])}, and its log?", yes)
        client.webhooks.delete(hook)
    if as_json:
        print_json({"id": hook, "deleted": True})
    else:
        console().print(f"deleted {plain(hook)}", markup=False)


def _outcome(client: Client, hook: str, delivery: Document) -> Document:
    """The delivery after one more attempt, or its state after `PATIENCE_S` seconds."""
    before, until = len(delivery["attempts"]), time.monotonic() + PATIENCE_S
    while len(delivery["attempts"]) == before and delivery["state"] == "pending" and time.monotonic() < until:
        time.sleep(0.2)
        delivery = client.webhooks.delivery(hook, delivery["id"])
    return delivery


def _report(delivery: Document, as_json: bool) -> None:
    """Print a delivery's outcome; exits with 1 unless it was delivered."""
    if as_json:
        print_json(delivery)
    else:
        state = Text(plain(delivery["state"]), _LOOKS.get(delivery["state"], ""))
        console().print(state, plain(delivery["id"]), plain(_last(delivery)), markup=False)
    raise typer.Exit(0 if delivery["state"] == "delivered" else FAILED)


def _show(hook: Document, as_json: bool) -> None:
    if as_json:
        print_json(hook)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("Webhook", hook["id"]),
        ("Address", hook["url"]),
        ("State", _state(hook)),
        ("Events", ", ".join(hook["events"])),
        ("Job", hook["job_id"] or "any"),
        ("Queue", hook["queue"] or "any"),
        ("Waiting", hook["pending"]),
        ("Trouble", hook["trouble"] or "none"),
    ):
        table.add_row(name, Text(plain(value)))
    console().print(table)


def _state(hook: Document) -> str:
    return "on" if hook["active"] else "off"


def _table(hooks: list[Document]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("Webhook", "State", "Waiting", "Events", "Address", "Trouble"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "Webhook")
    for hook in hooks:
        values = (hook["id"], _state(hook), hook["pending"], ", ".join(hook["events"]), hook["url"], hook["trouble"])
        table.add_row(*(Text(plain(NOTHING if value is None else value)) for value in values))
    return table


def _log(found: list[Document]) -> Table:
    table, now = Table(box=None, pad_edge=False, header_style="bold"), datetime.now(UTC)
    for heading in ("Delivery", "Event", "State", "Age", "Last attempt"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "Delivery")
    for delivery in found:
        state = Text(plain(delivery["state"]), _LOOKS.get(delivery["state"], ""))
        texts = [Text(plain(delivery[name])) for name in ("id", "event")]
        table.add_row(*texts, state, age(delivery["created_at"], now), Text(plain(_last(delivery))))
    return table


def _last(delivery: Document) -> str:
    """The result of the last attempt, as text."""
    if not delivery["attempts"]:
        return NOTHING
    last = delivery["attempts"][-1]
    tried = f", attempt {len(delivery['attempts'])}" if len(delivery["attempts"]) > 1 else ""
    return f"{last['error'] or last['status']}, {last['seconds']:.1f} s{tried}"
