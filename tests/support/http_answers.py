"""A small real HTTP server on loopback that answers as a test says, for what a client must withstand."""

import json
import select
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from computeshare.client.api.models import Job


@dataclass
class Answer:
    """One answer; a `body` that is no bytes is sent as JSON.

    Args:
        promised: a Content-Length other than the true one: the connection ends in mid-body.
        hang_up: close the connection without answering.
        until: keep the connection open after the body until this is set, or the other side closes it.
    """

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    promised: int | None = None
    hang_up: bool = False
    until: threading.Event | None = None


@dataclass
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class FakeServer:
    """Answers by `METHOD /path?query`; of several answers each is given once and the last for ever."""

    url: str = ""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    clock_off_s: float = 0.0
    """How far the clock behind the answers' Date is ahead."""
    open_streams: int = 0
    """Connections that are kept open after their body."""

    def on(self, request: str, *answers: Answer) -> None:
        self.answers[request] = list(answers)

    def asked(self, request: str) -> list[Request]:
        return [r for r in self.requests if f"{r.method} {r.path}" == request]


def stream(*events: str, until: threading.Event | None = None) -> Answer:
    """An event stream."""
    return Answer("".join(events).encode(), headers={"Content-Type": "text/event-stream"}, until=until)


def cut(*events: str) -> Answer:
    """An event stream whose connection breaks after these."""
    return Answer("".join(events).encode(), headers={"Content-Type": "text/event-stream", "Content-Length": "100000"})


def event(kind: str, data: object, number: int | None = None) -> str:
    """A server-sent event."""
    identity = "" if number is None else f"id: {number}\n"
    return f"event: {kind}\n{identity}data: {json.dumps(data)}\n\n"


def job(**changes: Any) -> Job:
    """A running job as the control plane tells it."""
    document: dict[str, Any] = {
        "id": "ab12cd34",
        "name": "first",
        "title": "first",
        "queue": "default",
        "spec": {"dataset": "digits", "model": "mlp", "rounds": 100},
        "status": "running",
        "reason": None,
        "error": None,
        "version": 25,
        "rounds_total": 100,
        "epoch": 2,
        "loss": 0.5,
        "accuracy": 0.75,
        "best_version": 20,
        "best_accuracy": 0.76,
        "durable_version": 20,
        "weights_sha256": "f" * 64,
        "samples_per_s": 1197.5,
        "workers": 2,
        "accepted": 100,
        "stale": 3,
        "duplicate": 1,
        "bytes_up": 1_500_000,
        "bytes_down": 3_000_000,
        "created_at": "2026-01-01T12:00:00Z",
        "started_at": "2026-01-01T12:00:05Z",
        "finished_at": None,
        "paused_at": None,
        "stopped_s": 0.0,
        "left_s": 7.5,
        "last_event_id": 7,
    }
    return {**document, **changes}  # type: ignore[typeddict-item,return-value]


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A running server, stopped at the end."""
    fake = FakeServer()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = f"{self.command} {self.path}"
            with lock:
                fake.requests.append(Request(self.command, self.path, dict(self.headers), body))
                queue = fake.answers.get(name) or [Answer({"detail": f"nothing at {name}"}, 404)]
                answer = queue.pop(0) if len(queue) > 1 else queue[0]
            self.close_connection = True
            if not answer.hang_up:
                self._send(answer)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + fake.clock_off_s)

        def _send(self, answer: Answer) -> None:
            content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            headers = {"Content-Type": "application/json", **answer.headers}
            if headers["Content-Type"] != "text/event-stream":
                headers["Content-Length"] = str(answer.promised or len(content))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")  # else a client would try the dead connection again
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()
            if answer.until:
                self._keep_open(answer.until)

        def _keep_open(self, until: threading.Event) -> None:
            with lock:
                fake.open_streams += 1
            deadline = time.monotonic() + 30
            while not until.wait(0.02) and time.monotonic() < deadline:
                if select.select([self.connection], [], [], 0)[0]:  # nothing more is sent: it is closed
                    break
            with lock:
                fake.open_streams -= 1

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
