"""Passes TCP connections on to a server, counts the bytes that come from it, and limits their rate."""

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

PIECE = 1 << 16


class Relay:
    """Forwards a loopback port to a server's.

    Args:
        server: host and port.
        bytes_per_s: the most that come from the server on each connection, from the next piece on; 0: no limit.
    """

    def __init__(self, server: tuple[str, int], bytes_per_s: float = 0.0) -> None:
        self._server, self.bytes_per_s = server, bytes_per_s
        self.bytes_down = 0
        """Bytes from the server so far, on all connections."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for ends, is_down in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._forward, args=(*ends, is_down), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_down: bool) -> None:
        with source, sink, contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                if is_down:
                    with self._lock:
                        self.bytes_down += len(piece)
                    if self.bytes_per_s:
                        time.sleep(len(piece) / self.bytes_per_s)
                sink.sendall(piece)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)
