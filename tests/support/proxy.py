"""A small TCP proxy between a client and the broker, whose link can be made bad in the ways that links go bad."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

_PIECE = 1 << 14


class Proxy:
    """Forwards a loopback port to another; what is set applies to every connection, from the next piece on.

    Args:
        target: host and port of the server.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.delay_s = 0.0
        """Seconds that every piece is held back, in both directions."""
        self.bytes_per_s = 0.0
        """Speed of each direction; 0 for no limit."""
        self.connections = 0
        """How many were made so far."""
        self._cut_after: int | None = None
        self._drop_reply = False
        self._open_link = threading.Event()
        self._open_link.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def cut_after(self, upload_bytes: int) -> None:
        """Cut the connection that sends this many more bytes, once; they still arrive, what follows does not."""
        with self._lock:
            self._cut_after = upload_bytes

    def drop_next_reply(self) -> None:
        """Let the next request through and cut the connection in place of its reply, once."""
        with self._lock:
            self._drop_reply = True

    def black_hole(self, on: bool) -> None:
        """While on, connections stay open and nothing comes through."""
        if on:
            self._open_link.clear()
        else:
            self.cut_all()  # what was held back is lost, as it is when a link's state times out
            self._open_link.set()

    def cut_all(self) -> None:
        """End every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _end(each)

    def close(self) -> None:
        _end(self._listener)
        self.cut_all()
        self._open_link.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=5)
        except OSError:
            _end(client)
            return
        server.settimeout(None)
        with self._lock:
            self._sockets |= {client, server}
            self.connections += 1
        for pair in ((client, server, self._let_up), (server, client, self._let_down)):
            threading.Thread(target=self._forward, args=pair, name="proxy link", daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, let: Callable[[bytes], tuple[bytes, bool]]) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                self._open_link.wait()
                if self.delay_s or self.bytes_per_s:
                    time.sleep(self.delay_s + (len(piece) / self.bytes_per_s if self.bytes_per_s else 0))
                piece, goes_on = let(piece)
                sink.sendall(piece)
                if not goes_on:
                    break
        for each in (source, sink):
            with self._lock:
                self._sockets.discard(each)
            _end(each)

    def _let_up(self, piece: bytes) -> tuple[bytes, bool]:
        """What of a piece from the client goes on to the server, and whether the connection does."""
        with self._lock:
            if self._cut_after is None:
                return piece, True
            if len(piece) < self._cut_after:
                self._cut_after -= len(piece)
                return piece, True
            kept, self._cut_after = piece[: self._cut_after], None
            return kept, False

    def _let_down(self, piece: bytes) -> tuple[bytes, bool]:
        with self._lock:
            if not self._drop_reply:
                return piece, True
            self._drop_reply = False
            return b"", False


def _end(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
