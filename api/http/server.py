"""The HTTP server, with limits on connections, on headers, and on the time a request may take to arrive."""

import asyncio
import resource
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE_S = 3
"""How long open requests may take to end when the server stops."""
ARRIVAL_S = 8.0
"""How long a request's line and headers may take to arrive, from the connection's start or the request's first byte."""
MAX_HEADER_BYTES = 32_768
MAX_CONNECTIONS = 1000
OTHER_FILES = 100
"""File descriptors kept free for the database, the broker and checkpoints."""
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a limit on connections, and on the time for a request to arrive (Slowloris
    attacks).
    """

    limit = MAX_CONNECTIONS
    arrival_s = ARRIVAL_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            transport.write(_BUSY)
            transport.close()
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        answered = self.cycle
        super().data_received(data)
        if self.cycle is not answered:  # a request has arrived
            self._drop_deadline()
        elif self.cycle is None or self.cycle.response_complete:  # part of a further request on a kept-alive connection
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        """Start the deadline, unless it runs already: later bytes of the same request do not extend it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.arrival_s, self.transport.abort)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server_of(app: FastAPI, **options: Any) -> uvicorn.Server:
    """A uvicorn server with these limits; `options` are passed to `uvicorn.Config`."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_S,
        access_log=False,
        log_level="warning",
        server_header=False,
        **options,
    )
    return uvicorn.Server(config)


def make_room_for_connections() -> None:
    """Raise this process's limit of file descriptors as far as the connections need it and the system allows; lower the
    limit of connections if that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        LimitedProtocol.limit = min(MAX_CONNECTIONS, max(1, allowed - OTHER_FILES))
