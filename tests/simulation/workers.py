"""A simulated worker: it leases and submits, forgets, repeats itself, sleeps and lies."""

import random
import uuid
from dataclasses import dataclass

from redis import Redis

from computeshare.errors import Banned, Fenced, JobGone
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Grant, WorkerSession
from tests.simulation.journal import Journal
from tests.simulation.model import GARBAGE, NOT_FINITE, update

SECONDS = {"waiting": 0.1, "computing": 0.2, "encoding": 0.01, "uploading": 0.02}
REPORT = {"bytes_up": 1, "bytes_down": 1, "seconds": SECONDS}


@dataclass(frozen=True, slots=True)
class Work:
    """A submission, ready to be sent, once or more often."""

    session: WorkerSession
    token: str
    nonce: str
    updates: tuple[tuple[int, bytes], ...]


class SimWorker:
    """One worker; the sessions it once had stay behind in `asleep` and may send what they computed, late."""

    def __init__(self, redis: Redis, job_id: str, name: str, journal: Journal, rng: random.Random) -> None:
        self.redis, self.job_id, self.name, self.journal, self.rng = redis, job_id, name, journal, rng
        self.keys = JobKeys(job_id)
        self.seat = f"{name}-seat-1"
        self.asleep: list[Work] = []
        self.sent: list[Work] = []
        self.crash()

    def crash(self) -> str:
        self.session: WorkerSession | None = None
        self.token = "0.0." + "0" * 16
        self.micro_batches: tuple[int, ...] = ()
        return "crashed"

    def join(self) -> str:
        """Begin a new session under the seat this worker believes it has."""
        session = WorkerSession(self.redis, self.job_id, self.name, f"{self.name}-{uuid.uuid4().hex}")
        assigned = self.redis.hget(self.keys.seats(), self.name)
        current = assigned.decode() if isinstance(assigned, bytes) else None
        try:
            status = session.join(self.seat, {})
        except Fenced:
            assert current != self.seat, "fenced though the seat is this worker's"
            if current is None:
                self.redis.hset(self.keys.seats(), self.name, self.seat)  # as the control plane issues it (again)
            else:
                self.seat = current
            return "fenced: another seat"
        if self.journal.held.token is None:
            assert status == "unopened", status
            return status
        assert current == self.seat, f"joined by {self.seat} though the seat is {current} by now"
        assert (status == "banned") == (status != "finished" and self.name in self.journal.held.banned), status
        if status == "running":
            self.crash()
            self.session = session
            self.journal.joined(self.name, session.session_id)
        return status

    def reseat(self) -> str:
        """The control plane gives this worker another seat, which the worker does not know yet."""
        self.redis.hset(self.keys.seats(), self.name, f"{self.name}-seat-{uuid.uuid4().hex}")
        return "another seat"

    def lease(self) -> str:
        """Ask for micro-batches on the version this worker knows."""
        if self.session is None:
            return self.join()
        expected = self.journal.lease_expected(self.name, self.session.session_id, self.token)
        try:
            grant = self.session.lease(self.token)
        except (Fenced, JobGone) as error:
            kinds = {Banned: "banned", Fenced: "fenced", JobGone: "gone"}
            assert expected == kinds[type(error)], f"{error!r}, expected {expected}"
            return self.crash()
        return self._granted(self.session, grant, expected)

    def _granted(self, session: WorkerSession, grant: Grant, expected: str | None) -> str:
        if expected is None:
            self.journal.leased(self.name, session.session_id, grant)
            if grant.micro_batches:
                self.token, self.micro_batches = grant.token, grant.micro_batches
        else:
            assert grant.answer == expected, f"{grant.answer}, expected {expected}"
            if expected != "wait":  # which is what a closed round answers
                self.token, self.micro_batches = grant.token, ()
        return f"{grant.answer} {list(grant.micro_batches)}"

    def compute(self, honest: bool) -> Work | None:
        """What this worker would send; a liar damages some of it, sends a micro-batch that it has no lease on, or names
        another version than it has computed on.
        """
        if self.session is None or not self.micro_batches:
            return None
        numbers = list(self.micro_batches)
        if not honest and self.rng.random() < 0.2:
            numbers = sorted({*numbers, self.rng.choice(numbers) + self.rng.choice((-1, 1))} - {-1})
        elif not honest and self.rng.random() < 0.2:
            numbers = numbers[: self.rng.randint(1, len(numbers))]
        updates = tuple((m, self._blob(m, honest)) for m in numbers)
        token = self.token
        if not honest and self.rng.random() < 0.1:
            token = str(self.rng.choice((self.journal.held.token, self.journal.held.before)) or token)
        return Work(self.session, token, uuid.uuid4().hex, updates)

    def _blob(self, micro_batch: int, honest: bool) -> bytes:
        if honest or self.rng.random() > 0.08:
            return update(self.token, micro_batch)
        return self.rng.choice((GARBAGE, NOT_FINITE))

    def submit(self, honest: bool = False) -> str:
        if not self.micro_batches:
            told = self.lease()
            if told.startswith("stale"):
                told = self.lease()
            if not self.micro_batches:
                return told
        work = self.compute(honest)
        assert work is not None
        self.micro_batches = ()
        return self.send(work)

    def submit_without_reply(self) -> str:
        """The submission takes effect, but the worker never learns of it and works on."""
        kept = self.micro_batches
        outcome = self.submit()
        self.micro_batches = kept if self.session else ()  # to be submitted again, under another nonce
        return f"{outcome}, reply lost"

    def send(self, work: Work) -> str:
        updates = [(m, [blob], 0.5) for m, blob in work.updates]
        receipt = work.session.submit(work.token, work.nonce, updates, REPORT)
        numbers = [m for m, _ in work.updates]
        self.journal.submitted(self.name, work.session.session_id, work.nonce, work.token, numbers, receipt)
        self.sent = [*self.sent, work][-3:]
        if work.session is self.session and receipt.outcome == "fenced":
            self.crash()
        return f"{receipt.outcome} {numbers}"

    def repeat(self) -> str:
        """Send something a second time, under the same nonce."""
        return self.send(self.rng.choice(self.sent)) if self.sent else "nothing to repeat"

    def sleep(self) -> str:
        """Compute something and send it much later; the worker itself goes on as if it had not."""
        work = self.compute(honest=True)
        if work is not None:
            self.asleep.append(work)
        self.micro_batches = ()
        return "asleep"

    def wake(self) -> str:
        return self.send(self.asleep.pop(self.rng.randrange(len(self.asleep)))) if self.asleep else "nothing asleep"

    def leave(self) -> str:
        if self.session is not None:
            self.session.leave("asked to")
            if self.journal.held.sessions.get(self.name) == self.session.session_id:
                self.journal.left(self.name)
        return self.crash()

    def removed(self, store: RoundStore) -> str:
        """The control plane takes this worker for dead; the worker does not know."""
        store.remove_worker(self.name, "not heard of")
        self.journal.left(self.name)
        return "removed"

    def pardoned(self, store: RoundStore) -> str:
        """Somebody lets this worker join again."""
        self.journal.pardoned(store.lift_ban(self.name), self.name)
        return "pardoned"
