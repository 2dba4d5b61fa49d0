"""A worker's side of the round protocol."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare.broker import BLOCK_MS
from computeshare.errors import Banned, Fenced, JobGone
from computeshare.failpoints import armed, failpoint
from computeshare.keys import JobKeys
from computeshare.rounds.scripts import Argument, Scripts
from computeshare.rounds.store import leave

STAGED_S = 600
"""Seconds that a staged blob, and the answer to a submission, are kept."""
SHORTEST_LEASE_MS = 2000
UNMEASURED_MS = 5000
"""Milliseconds a micro-batch is assumed to take on a worker that has not been measured yet."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request for a lease: micro-batches to compute on `token`, or what to do instead."""

    answer: str
    token: str
    ask_again_ms: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a submission."""

    outcome: str
    token: str
    status: str
    unleased: int


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a job's workers get leases."""

    backup: bool = True
    """Second leases are given on slow micro-batches."""
    sharers: int = 0
    """How many workers must share a round, each its part at most; 0: any."""
    fewest: int = 1
    """How many workers must be there at a time."""


class Member:
    """One worker's session in one job."""

    def __init__(
        self,
        redis: Redis,
        job_id: str,
        worker_id: str,
        session: str,
        terms: Terms = Terms(),
    ) -> None:
        self.redis = redis
        self.keys = JobKeys(job_id)
        self.worker_id = worker_id
        self.session = session
        self._terms = terms
        self._scripts = Scripts(redis)
        self._last_id = "0-0"

    def join(self, seat: str, about: dict[str, Any]) -> str:
        """Begin the session; returns the job's status, or `unopened`, or `banned`.

        Raises Fenced: another seat was given to this worker meanwhile.
        """
        k = self.keys
        names = [k.round(), k.sessions(), k.seats(), k.leases(), k.backups(), k.free(), k.versions(), k.events()]
        names.append(k.banned())
        event = json.dumps({"worker": self.worker_id, "session": self.session, "seat": seat, **about})
        status, last_id = self._scripts.call("join", names, [self.worker_id, self.session, seat, event])
        self._last_id = last_id.decode()
        if status == b"fenced":
            raise Fenced(f"worker {self.worker_id} has been given another seat than {seat}")
        return str(status.decode())

    def leave(self, reason: str) -> None:
        """End the session and hand its leases back; does nothing if it has ended."""
        failpoint("in_leave")
        leave(self._scripts, self.keys, self.worker_id, self.session, reason)

    def lease(self, token: str) -> Grant:
        """Ask for micro-batches of the round that starts from `token`."""
        return self._grant(self._scripts.call("lease", self._lease_keys(), self._lease_arguments(token)))

    def pull(self, token: str) -> tuple[bytes | None, Grant]:
        """A version's weights (None if superseded by now) and a lease on its round, in one exchange."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.get(self.keys.weights(token))
        self._scripts.queue(pipeline, "lease", self._lease_keys(), self._lease_arguments(token))
        blob, reply = self._scripts.execute(pipeline)
        return blob, self._grant(reply)

    def submit(
        self,
        token: str,
        nonce: str,
        updates: Sequence[tuple[int, bytes, float]],
        report: dict[str, Any],
    ) -> Receipt:
        """Stage the blobs and submit them; safe to repeat with the same nonce.

        Args:
            token: the version the updates were computed on.
            updates: micro-batch, blob and loss of each.
            report: what the job's page shows of it (bytes, seconds).
        """
        k = self.keys
        staged = [k.staged(f"{nonce}:{micro_batch}") for micro_batch, _, _ in updates]
        names = [k.round(), k.sessions(), k.leases(), k.backups(), k.received(), k.speeds(), k.nonce(nonce)]
        names += [k.full(), k.events(), k.free(), k.arrivals()]
        micro_batches = [micro_batch for micro_batch, _, _ in updates]
        about = {"worker": self.worker_id, "session": self.session, "nonce": nonce, "base": token}
        event = json.dumps({**about, "micro_batches": micro_batches, **report}, separators=(",", ":"))
        arguments: list[Argument] = [token, self.worker_id, self.session, nonce, event, STAGED_S, self._terms.sharers]
        pipeline = self.redis.pipeline(transaction=True)  # a broker without memory for a blob answers nothing at all
        for key, (micro_batch, blob, loss) in zip(staged, updates, strict=True):
            pipeline.set(key, blob, ex=STAGED_S)
            names += [key, k.update(token, micro_batch)]
            arguments += [micro_batch, loss]
        failpoint("before_push")
        if armed("between_stage_and_submit"):
            pipeline.execute()
            failpoint("between_stage_and_submit")
        self._scripts.queue(pipeline, "submit", names, arguments)
        outcome, current, status, unleased = self._scripts.execute(pipeline)[-1]
        failpoint("after_push")
        return Receipt(outcome.decode(), current.decode(), status.decode(), int(unleased))

    def wait(self, timeout_ms: int = BLOCK_MS) -> str | None:
        """Block until something happened to the job, at most `timeout_ms`.

        Returns: the token of a version just published; None otherwise (ask for a lease to learn more).
        """
        block = max(1, min(timeout_ms, BLOCK_MS))
        reply: Any = self.redis.xread({self.keys.versions(): self._last_id}, block=block)
        if not reply:
            return None
        entries = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]
        last_id, fields = entries[-1]
        self._last_id = last_id.decode()
        token = fields.get(b"token")
        return token.decode() if token else None

    def _lease_keys(self) -> list[str]:
        k = self.keys
        names = [k.round(), k.sessions(), k.leases(), k.backups(), k.received(), k.free(), k.speeds()]
        return [*names, k.events(), k.banned(), k.suspects()]

    def _lease_arguments(self, token: str) -> list[Argument]:
        terms = self._terms
        arguments: list[Argument] = [token, self.worker_id, self.session, int(terms.backup)]
        return [*arguments, SHORTEST_LEASE_MS, UNMEASURED_MS, terms.sharers, terms.fewest]

    def _grant(self, reply: list[Any]) -> Grant:
        answer, token = reply[0].decode(), reply[1].decode()
        if answer == "banned":
            raise Banned(f"worker {self.worker_id} is banned from the job: too many of its updates were refused")
        if answer == "fenced":
            raise Fenced(f"a newer session of worker {self.worker_id} has taken over")
        if answer == "gone":
            raise JobGone(f"job {self.keys.job_id} is not open")
        return Grant(answer, token, int(reply[2]), tuple(int(m) for m in reply[3:]))
