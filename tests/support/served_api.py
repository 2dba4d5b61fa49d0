"""ASGI applications behind a real socket, for tests that need one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from api.deps import Services
from api.http.server import server_of
from api.main import create_app
from computeshare.settings import Settings


@contextmanager
def serving(settings: Settings) -> Iterator[tuple[str, Any]]:
    """A whole control plane: its address and its application; it ends with the block."""
    app = create_app(settings)
    services: Services = app.state.services
    with served(app) as (url, server):
        services.stopping = lambda: server.should_exit
        yield url, app


@contextmanager
def served(app: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """An application's address and server."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = server_of(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()
