"""Measures how fast the control plane's pages come while hundreds of sockets send their requests a byte at a time.

    python -m bench.slow_sockets [--sockets 500] [--seconds 30]

Half of the sockets never finish their headers, half never finish a body. First on the API's own port, then behind
Caddy as docker-compose.yml has it, but without TLS, if Caddy is installed.
"""

import argparse
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from bench.gateway import running
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from bench.support.wait import wait_until
from computeshare.settings import Settings
from computeshare.up.embedded_broker import free_port

PAGES = ("/", "/workers", "/v1/jobs")
START = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900\r\n\r\n",
)
BYTE_S = 0.5
"""Seconds between two bytes of a socket."""
LOOK_S = 0.05
"""Seconds between two looks at the pages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sockets", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    end_cleanly_when_asked()
    rows: list[list[Cell]] = []
    with ours.plane(0, Settings().data_dir) as plane:
        token = plane.stack.settings.resolve_token()
        rows += measured("API's port", plane.stack.url, token, options)
        if shutil.which("caddy"):
            with caddy(plane.stack.url) as url:
                rows += measured("behind Caddy", url, token, options)
    columns = ["way", "slow sockets", "open at the end", "pages", "median, s", "95th percentile, s", "failed"]
    print(markdown(Part([Table("Pages beside slow sockets", columns, rows)])))


def measured(name: str, url: str, token: str, options: argparse.Namespace) -> list[list[Cell]]:
    """A row without slow sockets, and one with them."""
    rows = [[name, 0, 0, *asked(url, token, options.seconds / 3)]]
    slow, ended = Slow(url, options.sockets), threading.Event()
    thread = threading.Thread(target=slow.run, args=(ended,))
    thread.start()
    try:
        wait_until(lambda: slow.opened >= options.sockets, "the sockets to be open", 60)
        found = asked(url, token, options.seconds)
        return [*rows, [name, options.sockets, slow.open, *found]]
    finally:
        ended.set()
        thread.join()


def asked(url: str, token: str, seconds: float) -> list[Cell]:
    """Ask for pages one after the other: their number, median and 95th percentile of seconds, failures."""
    times, failed, until = [], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for page in PAGES:
            began = time.perf_counter()
            try:  # a connection for each, as new readers have
                answer = httpx2.get(url + page, headers={"Authorization": f"Bearer {token}"}, timeout=30)
                failed += answer.status_code != 200
            except httpx2.HTTPError:
                failed += 1
            times.append(time.perf_counter() - began)
        time.sleep(LOOK_S)
    times.sort()
    return [len(times), round(times[len(times) // 2], 3), round(times[int(0.95 * len(times))], 3), failed]


class Slow:
    """Sockets that send a byte now and then; one that is closed is opened again."""

    def __init__(self, url: str, count: int) -> None:
        parts = urlsplit(url)
        self._address, self._count = (parts.hostname, parts.port), count
        self._selector = selectors.DefaultSelector()
        self.opened = 0

    @property
    def open(self) -> int:
        return len(self._selector.get_map())

    def run(self, ended: threading.Event) -> None:
        """Hold the sockets open until `ended`."""
        while not ended.is_set():
            while self.open < self._count and not ended.is_set():
                self._open()
            for key in list(self._selector.get_map().values()):
                self._send(key.fileobj)
            for key, _ in self._selector.select(0):
                self._look(key.fileobj)
            ended.wait(BYTE_S)
        for key in list(self._selector.get_map().values()):
            self._close(key.fileobj)

    def _open(self) -> None:
        try:
            new = socket.create_connection(self._address, timeout=5)
            new.sendall(START[self.opened % 2])
        except OSError:
            return
        new.setblocking(False)
        self._selector.register(new, selectors.EVENT_READ)
        self.opened += 1

    def _send(self, one: Any) -> None:
        try:
            one.send(b"x")
        except OSError:
            self._close(one)

    def _look(self, one: Any) -> None:
        try:
            if not one.recv(4096):
                self._close(one)
        except BlockingIOError:
            return
        except OSError:
            self._close(one)

    def _close(self, one: Any) -> None:
        if one.fileno() != -1:
            self._selector.unregister(one)
            one.close()


@contextmanager
def caddy(target: str) -> Iterator[str]:
    """Caddy in front of an address."""
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as name:
        (file := Path(name, "Caddyfile")).write_text(
            f"{{\nadmin off\n}}\n{url} {{\nreverse_proxy {urlsplit(target).netloc}\n}}\n"
        )
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]
        with running(command, Path(name), lambda: httpx2.get(f"{url}/healthz", timeout=2).raise_for_status()):
            yield url


if __name__ == "__main__":
    main()
