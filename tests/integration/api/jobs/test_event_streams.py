"""Many watchers of a job, and watchers that go without a word."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from redis import Redis
from sqlalchemy import event

from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.served_api import serving

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 500}
WATCHERS = 60


@pytest.fixture
def served(settings: Settings) -> Iterator[tuple[httpx2.Client, Any]]:
    with (
        serving(settings) as (url, app),
        httpx2.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as http,
    ):
        yield http, app


@pytest.fixture
def job(served: tuple[httpx2.Client, Any]) -> str:
    return str(served[0].post("/v1/jobs", json=SPEC).json()["id"])


@pytest.fixture
def feed(redis: Redis, job: str) -> Feed:
    return Feed(redis, job, JobSpec(**SPEC).plan)


class Watcher:
    """A bare socket on a job's stream."""

    def __init__(self, http: httpx2.Client, job: str, after: int = 0) -> None:
        self.socket = socket.create_connection((http.base_url.host, http.base_url.port or 80), timeout=30)
        lines = (f"GET /v1/jobs/{job}/events?after={after} HTTP/1.1", "Host: localhost", "Authorization: Bearer secret")
        self.socket.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        self.text = b""

    def until(self, what: bytes) -> bytes:
        """Everything that came, up to the first that has this."""
        while what not in self.text:
            piece = self.socket.recv(1 << 16)
            assert piece, f"the stream ended without {what!r}"
            self.text += piece
        return self.text


def test_watchers_that_go_without_a_word_are_no_errors(
    served: tuple[httpx2.Client, Any],
    feed: Feed,
    job: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    http, _ = served
    feed.open()
    feed.join()
    caplog.set_level(logging.WARNING)
    stop = threading.Event()

    def commit() -> None:
        while not stop.is_set():
            feed.commit()
            stop.wait(0.02)

    committing = threading.Thread(target=commit)
    committing.start()
    try:
        for _ in range(3):
            watchers = [Watcher(http, job) for _ in range(WATCHERS)]
            for number, watcher in enumerate(watchers):
                if number % 3:
                    watcher.until(b"event: job")
                if number % 2:
                    with contextlib.suppress(OSError):
                        watcher.socket.shutdown(socket.SHUT_RDWR)
                watcher.socket.close()
        assert http.get(f"/v1/jobs/{job}").status_code == 200
        time.sleep(2)  # what is still being sent finds nobody
    finally:
        stop.set()
        committing.join()
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out + caplog.text and "unexpected error" not in told.err + told.out


def test_many_watchers_cost_the_database_no_more_than_one(
    served: tuple[httpx2.Client, Any], feed: Feed, job: str
) -> None:
    http, app = served
    feed.open()
    feed.join()
    watchers = [Watcher(http, job) for _ in range(WATCHERS)]
    for watcher in watchers:
        watcher.until(b"event: joined")
    asked: list[str] = []
    event.listen(
        app.state.services.database.engine, "checkout", lambda *_: asked.append(threading.current_thread().name)
    )
    for _ in range(10):
        feed.commit()
    for watcher in watchers:
        watcher.until(b'"version":10,')
    # The loops of the control plane run in threads that have names of their own.
    by_watchers = [name for name in asked if name.startswith("AnyIO")]
    assert 0 < len(by_watchers) < WATCHERS


def test_every_watcher_gets_every_event_once_and_in_order_wherever_it_begins(
    served: tuple[httpx2.Client, Any], feed: Feed, job: str
) -> None:
    http, _ = served
    feed.open()
    feed.join()
    for _ in range(40):
        feed.commit()
    first = Watcher(http, job)
    ids = events_of(first.until(b'"version":40,'))
    late = [Watcher(http, job, after) for after in (0, ids[3], ids[-1])]
    for _ in range(40):
        feed.commit()
    whole = events_of(first.until(b'"version":80,'))
    assert whole == sorted(set(whole)) and whole[: len(ids)] == ids
    for watcher, after in zip(late, (0, ids[3], ids[-1]), strict=True):
        got = events_of(watcher.until(b'"version":80,'))
        expected = [each for each in whole if each > after]
        assert got == expected[: len(got)] and len(got) >= len(expected) - 1


def events_of(text: bytes) -> list[int]:
    """The ids of a stream's events, those of versions up to the last whole one."""
    found = []
    for block in text.decode(errors="replace").split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "id" in lines and json.loads(lines["data"]):
            found.append(int(lines["id"]))
    return found
