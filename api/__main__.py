"""`python -m api`: the control plane alone, for where the broker and the other processes run elsewhere."""

from contextlib import suppress
from typing import Annotated

import typer

from api.main import run
from computeshare.broker import OUTAGES, connect
from computeshare.processes import configure_logging, exit_with_parent
from computeshare.settings import Settings


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="End with the process that started it.")] = False,
    owns_broker: Annotated[
        bool, typer.Option("--owns-broker", hidden=True, help="... and end the broker then.")
    ] = False,
) -> None:
    """Serve the REST API and the pages."""
    settings = Settings()
    if child:
        exit_with_parent(lambda: _end_broker(settings) if owns_broker else None)
    configure_logging()
    run(settings, host, port)


def _end_broker(settings: Settings) -> None:
    """The embedded broker cannot see that `computeshare up` was killed; whoever can, ends it."""
    with suppress(*OUTAGES):
        connect(settings.resolve_redis_url(), retries=0).shutdown(nosave=True)


if __name__ == "__main__":
    typer.run(command)
