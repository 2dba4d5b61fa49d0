"""A worker without a model: the round protocol over a socket of its own that fails when it is told to."""

import threading
import time
import uuid
from typing import Any

from redis import Connection, ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from computeshare.errors import Fenced, JobGone
from computeshare.rounds import Grant, Member

KINDS = ("death", "sleep", "cut", "repeat", "lost reply")
SLEEP_S = 3.0
REBORN_S = 1.0
"""How long a worker that died takes to come back, under another id."""


class Mishap:
    """What is to happen to the next message of a connection: `cut` in the middle of it, or `lost reply`."""

    def __init__(self) -> None:
        self.kind = ""


class FragileConnection(Connection):
    """A connection to which its mishap happens."""

    def __init__(self, mishap: Mishap, **named: Any) -> None:
        super().__init__(**named)
        self._mishap = mishap

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        kind, self._mishap.kind = self._mishap.kind, ""
        if kind == "cut":
            whole = command if isinstance(command, bytes) else b"".join(command)
            super().send_packed_command([whole[: len(whole) // 2]], check_health)
        else:
            super().send_packed_command(command, check_health)
        if kind:
            self.disconnect()
            raise RedisConnectionError(kind)


class Worker:
    """Leases and submits as a seat does, with a blob that was made beforehand in place of what it would compute."""

    def __init__(self, url: str, job_id: str, blob: bytes, name: str, stop: Any, dead: Any) -> None:
        self._job_id, self._blob, self._stop, self._dead = job_id, blob, stop, dead
        self._mishap = Mishap()
        self._pool = ConnectionPool.from_url(
            url, connection_class=FragileConnection, mishap=self._mishap, socket_timeout=10, retry=None
        )
        self._redis = Redis(connection_pool=self._pool)
        self._id = name
        self._next = ""
        self._lock = threading.Lock()

    def fail_next(self, kind: str) -> None:
        """Let this happen at the next submission."""
        with self._lock:
            self._next = kind

    def run(self) -> None:
        """Serve the job until told to stop, whatever happens."""
        while not self._stop.is_set():
            try:
                self._serve()
            except (RedisError, Fenced, JobGone):
                time.sleep(0.05)

    def _serve(self) -> None:
        """One session."""
        self._member = Member(self._redis, self._job_id, self._id, uuid.uuid4().hex)
        self._member.join("seat", {"name": self._id, "device": "none"})
        loaded = ""
        grant = self._member.lease(loaded)
        while not self._stop.is_set():
            match grant.answer:
                case "stale":
                    loaded = grant.token
                    _, grant = self._member.pull(loaded)
                case "leased":
                    grant = self._submit(grant)
                case "wait":
                    token = self._member.wait(min(grant.ask_again_ms, 1000))
                    grant = Grant("stale", token, 0, ()) if token and token != loaded else self._member.lease(loaded)
                case _:
                    return
        self._member.leave("the end")

    def _submit(self, grant: Grant) -> Grant:
        with self._lock:
            kind, self._next = self._next, ""
        if kind == "death":
            self._die()
        if kind == "sleep":
            time.sleep(SLEEP_S)
        if kind in ("cut", "lost reply"):
            self._mishap.kind = kind
        updates = [(micro_batch, self._blob, 1.0) for micro_batch in grant.micro_batches]
        report = {"bytes_up": len(self._blob) * len(updates), "bytes_down": 0, "seconds": {}}
        nonce = uuid.uuid4().hex
        try:
            receipt = self._member.submit(grant.token, nonce, updates, report)
        except RedisConnectionError:
            receipt = self._member.submit(grant.token, nonce, updates, report)  # as it was: the same nonce
        if kind == "repeat":
            receipt = self._member.submit(grant.token, nonce, updates, report)
        if receipt.outcome == "gone":
            raise JobGone("the job is over")
        if receipt.outcome == "fenced":
            raise Fenced("this worker was buried while it slept")
        if receipt.token != grant.token:
            return Grant("stale", receipt.token, 0, ())
        return self._member.lease(grant.token) if receipt.unleased else Grant("wait", grant.token, 500, ())

    def _die(self) -> None:
        """Vanish with the lease in hand, without a word to the others; come back as somebody else. Raises Fenced."""
        self._pool.disconnect()
        self._dead.put(self._id)
        self._stop.wait(REBORN_S)
        self._id = uuid.uuid4().hex[:12]
        raise Fenced("died")
