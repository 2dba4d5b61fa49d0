"""A receiver of webhooks behind a real socket, that answers as a test says."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TRICKLE = -1
"""In the place of a status: an answer that never ends its headers."""
HANG = -2
"""In the place of a status: no answer."""


@dataclass
class Heard:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """`statuses` are answered one after the other, the last for ever."""

    url: str = ""
    statuses: list[int] = field(default_factory=lambda: [204])
    headers: dict[str, str] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def status(self) -> int:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


@contextmanager
def receiving(*statuses: int, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A running receiver, stopped at the end."""
    receiver = Receiver(statuses=list(statuses) or [204])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                receiver.heard.append(Heard(self.path, dict(self.headers), body))
                status = receiver.status()
            if status == HANG:
                receiver.over.wait(30)
            elif status == TRICKLE:
                self._trickle()
            else:
                self.send_response(status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

        def _trickle(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not receiver.over.wait(0.02):
                try:
                    self.wfile.write(b"X-More: yes\r\n")
                    self.wfile.flush()
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # whoever asked has gone
        receiver.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}/hook"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.over.set()
            server.shutdown()
            thread.join()
