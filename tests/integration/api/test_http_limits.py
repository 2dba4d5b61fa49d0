"""What the HTTP server takes from clients that are slow on purpose, too many, or guessing."""

import contextlib
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.responses import Response

from api.http.security import TRIES
from api.http.server import LimitedProtocol
from computeshare.settings import Settings, login_path
from computeshare.up.stack import rotate_logs
from tests.support.served_api import served, serving

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    with serving(settings) as (url, _):
        httpx2.get(f"{url}/healthz", timeout=60)
        yield url


def opened(url: str, receive_bytes: int | None = None) -> socket.socket:
    """A connection; `receive_bytes`: how much the kernel takes for it before somebody reads."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(30)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    return connection


def test_slow_sockets_are_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "arrival_s", 0.5)
    silent, slow, kept = ([opened(url) for _ in range(20)] for _ in range(3))
    for each in kept:
        each.sendall(REQUEST)
        assert b"200 OK" in each.recv(10_000)
    deadline = time.monotonic() + 20
    while slow and time.monotonic() < deadline:
        for each in (*slow, *kept):
            with contextlib.suppress(OSError):
                each.sendall(b"G")  # a byte now and then
        slow = [each for each in slow if not is_closed(each)]
        time.sleep(0.05)
    assert slow == []
    assert all(ends(each) for each in (*silent, *kept))
    assert httpx2.get(f"{url}/healthz", timeout=30).status_code == 200


@pytest.mark.slow
def test_clients_that_do_not_read_are_cut_and_slow_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "read_s", 0.5)
    body = bytes(20_000_000)  # more than the kernel holds
    with served(Response(body)) as (url, _):
        slow, *silent = [opened(url, receive_bytes=4096) for _ in range(4)]
        for each in (slow, *silent):
            each.sendall(REQUEST)
        assert taken(slow, bytes_per_s=4_000_000) > len(body)
        assert all(taken(each) < len(body) for each in silent)
        assert httpx2.get(url, timeout=30).content == body


def taken(connection: socket.socket, bytes_per_s: float = math.inf) -> int:
    """How many bytes come until the connection ends, or is kept alive without more of them."""
    count = 0
    connection.settimeout(3)
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while received := connection.recv(20_000):
            count += len(received)
            time.sleep(len(received) / bytes_per_s)
    return count


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(10_000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def ends(connection: socket.socket) -> bool:
    """Whether it is closed before this test's patience ends."""
    connection.settimeout(20)
    try:
        while connection.recv(10_000):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_headers_are_bounded_in_number_and_bytes(url: str) -> None:
    many = {f"x-{number}": "1" for number in range(150)}
    large = {"x-large": "a" * 40_000}
    assert httpx2.get(f"{url}/healthz", headers=many, timeout=30).status_code == 431
    assert httpx2.get(f"{url}/healthz", headers=large, timeout=30).status_code in (400, 431)
    assert httpx2.get(f"{url}/healthz", headers={"x-large": "a" * 8000}, timeout=30).status_code == 200


def test_connections_are_bounded_and_free_again_when_others_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "limit", 10)
    held = [opened(url) for _ in range(10)]
    for each in held:
        each.sendall(REQUEST)
        assert b"200 OK" in each.recv(10_000)
    with opened(url) as refused:
        assert refused.recv(10_000).startswith(b"HTTP/1.1 503")
    for each in held:
        each.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/healthz", timeout=30).status_code == 200:
                return
    raise AssertionError("nobody was let in again")


@pytest.mark.parametrize("path", ["/login?key=guess", "/join/guess"])
@pytest.mark.slow
def test_guessing_is_slowed_down_and_being_right_is_not(url: str, path: str) -> None:
    for _ in range(3 * TRIES):
        assert httpx2.get(url + login_path("secret"), timeout=30).status_code == 303
    codes = [httpx2.get(url + path, timeout=30).status_code for _ in range(TRIES + 1)]
    last = httpx2.get(url + path, timeout=30)
    assert 429 not in codes[:TRIES] and last.status_code == 429
    assert 1 <= int(last.headers["retry-after"]) <= 10 and "try again" in last.json()["detail"]
    assert httpx2.get(f"{url}/healthz", timeout=30).status_code == 200


def test_a_log_is_cut_while_its_process_goes_on_writing(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    code = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
    with open(path, "ab") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, text=True)
    assert process.stdin is not None
    with process.stdin as lines:
        lines.write("before\n" * 1000)
        lines.flush()
        deadline = time.monotonic() + 20
        while path.stat().st_size < 7000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rotate_logs(tmp_path, largest_bytes=8000)
        assert path.stat().st_size == 7000
        rotate_logs(tmp_path, largest_bytes=5000)
        lines.write("after\n")
    assert process.wait(20) == 0
    assert path.read_text() == "after\n"
    assert path.with_suffix(".log.1").read_text() == "before\n" * 1000
