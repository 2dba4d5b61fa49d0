"""The command `computeshare-gateway`: the gateway alone, beside the API or on another port; any number may run.

It reads the control plane's database and uses its broker, so it runs with the same home.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from api.broker import Broker
from api.database import Database
from api.gateway.app import Gateway, gateway_of
from api.http.server import make_room_for_connections, server_of
from computeshare.runtime.processes import configure_logging
from computeshare.settings import Settings
from computeshare.terminal.command import Version, run_command
from computeshare.transport.addresses import GATEWAY_PATH

Answer = Callable[[Any, Any, Any], Awaitable[None]]


def alone(gateway: Gateway) -> Answer:
    """An ASGI application with the gateway at `/v1/gateway`, and `/healthz`."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and scope["path"] == f"/{GATEWAY_PATH}":
            await gateway(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            status, body = (200, b"ok") if scope["path"] == "/healthz" else (404, b"not found")
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})

    return answer


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8001,
    home: Annotated[Path | None, typer.Option(help="The control plane's folder.")] = None,
    version: Version = False,
) -> None:
    """Carry invited machines' connections to the broker, as the API does on its own port."""
    settings = Settings.given(home=home)
    configure_logging()
    database, broker = Database(settings.sqlite_url, settings.database_file.backups), Broker(settings)
    make_room_for_connections()
    try:
        server_of(alone(gateway_of(settings, database, broker)), host=host, port=port, lifespan="off").run()
    finally:
        broker.close()
        database.close()


def main() -> None:
    """The command `computeshare-gateway`."""
    run_command(command)


if __name__ == "__main__":
    main()
