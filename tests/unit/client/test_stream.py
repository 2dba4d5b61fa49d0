"""The one stream of events that is asynchronous."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import pytest

from computeshare.client import ComputeShare, Job, Problem
from tests.support.coroutines import asynchronously
from tests.support.http_answers import Answer, FakeServer, cut, event, job, stream

PATIENCE_S = 10
SHOW, EVENTS = "GET /v1/jobs/ab12cd34", "GET /v1/jobs/ab12cd34/events"


@pytest.fixture
def found(server: FakeServer) -> Iterator[Job]:
    server.on(SHOW, Answer(job()))
    with ComputeShare(server.url, "secret", timeout_s=5) as cs:
        yield cs.jobs.get("ab12cd34")


def test_the_stream_goes_on_where_it_broke_off(server: FakeServer, found: Job) -> None:
    first = stream(event("joined", {"worker": "w1"}, 8), event("job", job(version=40)))
    second = stream(event("version", {"version": 41}, 9), event("job", job(status="completed", version=100)))
    server.on(EVENTS, first, Answer(hang_up=True), second)

    async def read() -> list[str]:
        return [one.type async for one in found.stream()]

    assert asynchronously(read()) == ["joined", "job", "lost", "lost", "version", "job"]
    assert [request.headers["Last-Event-ID"] for request in server.asked(EVENTS)] == ["7", "8", "8"]
    assert (found.status, found.version) == ("completed", 100)
    assert server.asked(EVENTS)[0].headers["Authorization"] == "Bearer secret"


def test_a_stream_that_is_cut_behind_the_jobs_end_goes_on(server: FakeServer, found: Job) -> None:
    ended = job(status="completed")
    first = cut(event("job", ended), event("created", {}, 1))
    server.on(EVENTS, first, stream(event("job", ended), event("completed", {}, 2)))

    async def read() -> list[str]:
        return [one.type async for one in found.stream(after=0)]

    assert asynchronously(read()) == ["job", "created", "lost", "job", "completed"]


def test_a_refusal_ends_the_stream(server: FakeServer, found: Job) -> None:
    server.on(EVENTS, Answer({"detail": "there is no job ab12cd34"}, 404))

    async def read() -> None:
        async for _ in found.stream():
            raise AssertionError("there was an event")

    with pytest.raises(Problem, match="there is no job"):
        asynchronously(read())


@dataclass
class Line:
    """The server's end of one connection, which sends an event and then listens."""

    url: str = ""
    was_closed: threading.Event = field(default_factory=threading.Event)


@contextmanager
def talking() -> Iterator[Line]:
    """A server whose stream goes on for as long as the other side keeps the connection."""
    line = Line()
    chunk = event("job", job(version=26)).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.recv(65536)
            connection.sendall(head + f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            if connection.recv(1) == b"":
                line.was_closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        line.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        yield line
        thread.join()


def of(url: str) -> Job:
    """A running job of this server, without asking it."""
    cs = ComputeShare(url, "secret", timeout_s=5)
    return cs.jobs._job(json.loads(json.dumps(job())))


def test_cancelling_the_task_that_reads_closes_the_connection() -> None:
    async def read(found: Job, seen: asyncio.Event) -> None:
        async for _ in found.stream():
            seen.set()

    async def cancel(line: Line) -> bool:
        found, seen = of(line.url), asyncio.Event()
        reading = asyncio.create_task(read(found, seen))
        await asyncio.wait_for(seen.wait(), PATIENCE_S)
        assert found.version == 26
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return await asyncio.to_thread(line.was_closed.wait, PATIENCE_S)  # the loop still runs: nothing else closes it

    with talking() as line:
        assert asynchronously(cancel(line))


def test_leaving_the_loop_closes_the_connection() -> None:
    async def leave(line: Line) -> bool:
        async with aclosing(of(line.url).stream()) as events:
            async for _ in events:
                break
        return await asyncio.to_thread(line.was_closed.wait, PATIENCE_S)

    with talking() as line:
        assert asynchronously(leave(line))
