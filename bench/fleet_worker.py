"""A worker without a model: speaks the round protocol over a socket of its own, with injected faults."""

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from computeshare.errors import Fenced, JobGone
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.transport.commands import Command, frame
from computeshare.transport.wire import Wire, Wires

KINDS = ("death", "sleep", "cut", "repeat", "lost reply")
SLEEP_S = 3.0
REBORN_S = 1.0
"""Seconds until a dead worker comes back under another id."""


class FragileWire(Wire):
    """A connection that fails at the next exchange if `mishap` is set."""

    mishap = ""
    """`cut`: fails in the middle of sending; `lost reply`: fails before reading the reply."""

    def exchange(self, commands: Sequence[Command], *arguments: Any, **options: Any) -> list[Any]:
        kind, self.mishap = self.mishap, ""
        if not kind:
            return super().exchange(commands, *arguments, **options)
        data = b"".join(piece for command in commands for piece in frame(command))
        self._ready()
        link = self._link
        assert link is not None
        link.setblocking(True)
        link.sendall(data[: len(data) // 2] if kind == "cut" else data)
        self.close()
        raise RedisConnectionError(kind)


class Worker:
    """Leases and submits as a seat does, with a precomputed message in place of a computed update."""

    def __init__(self, url: str, job_id: str, message: Sequence[bytes], name: str, stop: Any, dead: Any) -> None:
        self._job_id, self._message, self._stop, self._dead = job_id, message, stop, dead
        self._weights_parts = len(message) + 1  # weights hold counters as well
        self._redis = Redis.from_url(url, socket_timeout=10, retry=None)
        self._wire = FragileWire(self._redis)
        self._id = name
        self._next = ""
        self._lock = threading.Lock()

    def fail_next(self, kind: str) -> None:
        """Inject a fault of this kind at the next submission."""
        with self._lock:
            self._next = kind

    def run(self) -> None:
        """Serve the job until stopped, with a new session after each error."""
        while not self._stop.is_set():
            try:
                self._serve()
            except (RedisError, Fenced, JobGone):
                time.sleep(0.05)

    def _serve(self) -> None:
        """Serve the job for one session."""
        self._session = WorkerSession(
            self._redis, self._job_id, self._id, uuid.uuid4().hex, wires=Wires(self._wire, self._wire)
        )
        self._session.redis.hset(self._session.keys.seats(), self._id, "seat")
        self._session.join("seat", {"name": self._id, "device": "none"})
        loaded = ""
        grant = self._session.lease(loaded)
        while not self._stop.is_set():
            match grant.answer:
                case "stale":
                    loaded = grant.token
                    _, grant = self._session.pull(loaded, self._weights_parts)
                case "leased":
                    grant = self._submit(grant)
                case "wait":
                    token = self._session.wait(min(grant.ask_again_ms, 1000))
                    grant = Grant("stale", token, 0, ()) if token and token != loaded else self._session.lease(loaded)
                case _:
                    return
        self._session.leave("the end")

    def _submit(self, grant: Grant) -> Grant:
        with self._lock:
            kind, self._next = self._next, ""
        if kind == "death":
            self._die()
        if kind == "sleep":
            time.sleep(SLEEP_S)
        if kind in ("cut", "lost reply"):
            self._wire.mishap = kind
        updates = [(micro_batch, self._message, 1.0) for micro_batch in grant.micro_batches]
        report = {"bytes_up": sum(map(len, self._message)) * len(updates), "bytes_down": 0, "seconds": {}}
        nonce = uuid.uuid4().hex
        try:
            receipt = self._session.submit(grant.token, nonce, updates, report, and_lease=True)
        except RedisConnectionError:
            receipt = self._session.submit(grant.token, nonce, updates, report, and_lease=True)  # the same nonce
        if kind == "repeat":
            receipt = self._session.submit(grant.token, nonce, updates, report, and_lease=True)
        if receipt.outcome == "gone":
            raise JobGone("the job is over")
        if receipt.outcome == "fenced":
            raise Fenced("this worker was buried while it slept")
        assert receipt.grant is not None
        return receipt.grant

    def _die(self) -> None:
        """Disconnect while holding a lease, without leaving, and come back under another id. Raises Fenced."""
        self._wire.close()
        self._redis.close()
        self._dead.put(self._id)
        self._stop.wait(REBORN_S)
        self._id = uuid.uuid4().hex[:12]
        raise Fenced("died")
