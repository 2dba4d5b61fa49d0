"""A whole control plane behind a real socket, for tests that need one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from api.deps import Services
from api.http.server import server_of
from api.main import create_app
from computeshare.settings import Settings


@contextmanager
def serving(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Its address and its application; it ends with the block."""
    app = create_app(settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = server_of(app)
    services: Services = app.state.services
    services.stopping = lambda: server.should_exit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()
