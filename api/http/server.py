"""The HTTP server, with limits on connections, on headers, and on the time that requests and answers may take."""

import asyncio
import resource
from typing import Any

import h11
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

GRACE_S = 3
"""How long open requests may take to end when the server stops."""
ARRIVAL_S = 8.0
"""How long a request's line and headers may take to arrive, from the connection's start or the request's first byte."""
READ_S, LEAST_READ_BYTES = 30.0, 32_768
"""A client must take so many bytes of an answer, or all that is left, in each such time; else it is cut."""
MAX_HEADER_BYTES = 32_768
MAX_CONNECTIONS = 1000
OTHER_FILES = 100
"""File descriptors kept free for the database, the broker and checkpoints."""
MAX_MESSAGE_BYTES = 1 << 20
"""The largest message of a WebSocket."""
MAX_FRAGMENTS = 64
"""The most frames that one message may come in."""
MAX_UNSENT_BYTES = 1 << 20
"""A WebSocket that asks for answers to pings, and does not read them, is cut once so much is to be sent."""
PING_S, PONG_S = 15.0, 30.0
"""Seconds between pings on a WebSocket, which keep proxies from cutting it; seconds until the answer is overdue."""
LINGER_S = 5.0
"""How long the rest may take to be sent after a WebSocket's end."""
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with limits on connections, on the time for a request to arrive (Slowloris attacks),
    and on how slowly a client may read.
    """

    limit = MAX_CONNECTIONS
    arrival_s = ARRIVAL_S
    read_s = READ_S
    _deadline: asyncio.TimerHandle | None = None
    _next_look: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes that the client had not taken when they were looked at last."""
    _has_resumed = False
    """Whether writing was resumed since: the client has taken what was between the transport's two marks, 48 KiB."""
    _upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next_look = self.loop.call_later(self.read_s, self._look)
        if len(self.connections) > self.limit:
            transport.write(_BUSY)
            transport.close()
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        answered = self.cycle
        super().data_received(data)
        if self._upgraded or self.cycle is not answered:  # a request has arrived
            self._drop_deadline()
        elif self.cycle is None or self.cycle.response_complete:  # part of a further request on a kept-alive connection
            self._set_deadline()

    def resume_writing(self) -> None:
        self._has_resumed = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        self._end_looks()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._end_looks()
        super().handle_websocket_upgrade(event)

    def _set_deadline(self) -> None:
        """Start the deadline, unless it runs already: later bytes of the same request do not extend it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.arrival_s, self.transport.abort)

    def _look(self) -> None:
        """Cut a client that takes too little of an answer, even where the connection is closing: it would wait."""
        unsent = self.transport.get_write_buffer_size()
        if self._unsent and unsent > max(0, self._unsent - LEAST_READ_BYTES) and not self._has_resumed:
            self.transport.abort()
            return
        self._unsent, self._has_resumed = unsent, False
        self._next_look = self.loop.call_later(self.read_s, self._look)

    def _end_looks(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with limits on fragments, on unread answers to pings, and on the time after its end.

    A message is at most `MAX_MESSAGE_BYTES` long, and is read only once the application has taken those before.
    """

    linger_s = LINGER_S

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self.transport.abort()
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.transport.abort()
            return
        super().handle_ping()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # before the handshake there is nothing to close, which uvicorn presumes
            self.transport.abort()
            return
        super().handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        if (
            self.curr_msg_data_type == "text"
        ):  # else uvicorn logs what is no UTF-8 as an error; no application takes text
            self.frames = [b"".join(self.frames).decode(errors="replace").encode()]
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # else uvicorn logs each refusal as an error
        elif message["type"] == "websocket.accept" and not self.handshake_complete:
            raise ClientDisconnected

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        super().on_task_complete(task)
        self.loop.call_later(self.linger_s, self.transport.abort)


def server_of(app: Any, **options: Any) -> uvicorn.Server:
    """A uvicorn server of an ASGI application, with these limits; `options` are passed to `uvicorn.Config`."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws=LimitedWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PONG_S,
        ws_per_message_deflate=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_S,
        access_log=False,
        log_level="warning",
        server_header=False,
        **options,
    )
    return uvicorn.Server(config)


async def serve_both(main: uvicorn.Server, other: uvicorn.Server) -> None:
    """Serve until a signal ends the process. `main` handles signals, and starts and stops the application."""

    async def follow() -> None:
        while not main.should_exit:
            await asyncio.sleep(0.1)
        other.should_exit = True

    async def serve_other() -> None:
        while not main.started and not main.should_exit:
            await asyncio.sleep(0.05)
        await other._serve()  # without handlers of signals

    await asyncio.gather(main.serve(), serve_other(), follow())


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
