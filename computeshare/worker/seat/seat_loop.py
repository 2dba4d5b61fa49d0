"""A seat's loop, in the order of docs/protocol.md: pull the version and a lease, compute, submit, wait for the next."""

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from computeshare.codecs.feedback import Feedback
from computeshare.errors import CodecError, Interrupted, JobGone
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import Grant, Member, Receipt, Waiting
from computeshare.runtime.failpoints import failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.transport.connections import when_there_is_room
from computeshare.types import Token
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.seat.update_sender import UpdateQueue
from computeshare.worker.seat.weights_receiver import Inbox

if TYPE_CHECKING:
    from computeshare.training.work_units import AnyReplica

AHEAD = 8
"""Micro-batches that are assembled ahead, at most: of a longer round it is not known which of them will be leased."""
SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 20, 1000
"""For how long a seat waits for news at a time; a signal to leave is looked at after each."""
ALL_AT_ONCE_S = 0.25
"""Computing up to which a lease is taken to be all that the worker gets of a round; after more it asks."""
SLOW_UPLOAD_S = 5.0
REMARKS = {
    "stale": "too late: another version is current",
    "lease_lost": "lease lost: another worker has the work",
    "fenced": "fenced: a newer session of this worker is there",
    "refused": "not taken: what was sent is gone or not whole",
}
"""What the outcomes of a submission mean to whoever reads the log."""
ASKED = "the worker was asked to leave"
log = structlog.get_logger()


@dataclass(slots=True)
class SeatStatus:
    """How far a seat is, for its worker's display."""

    is_loaded: bool = False
    is_working: bool = False
    """Whether it computes, or sends updates."""
    version: int = 0
    samples: int = 0


class SeatLoop:
    """Takes part in a job's rounds until there is a reason to end."""

    def __init__(
        self,
        spec: JobSpec,
        member: Member,
        keeper: LeaseKeeper,
        replica: "AnyReplica",
        feedback: Feedback | None,
        inbox: Inbox,
        outbox: UpdateQueue,
        memory: SeatMemory,
        status: SeatStatus,
        stop: threading.Event,
    ) -> None:
        self.member, self.keeper, self.replica, self.inbox, self.outbox = member, keeper, replica, inbox, outbox
        self.feedback, self.status, self.stop = feedback, status, stop
        self._strategy, self._plan, self._memory = spec.strategy, spec.plan, memory
        self._waiting_s = 0.0
        self._submitted_at = 0.0
        self._usual_wait_s = 0.0
        """From a submission to the next version; 0: there is more to do before that."""
        self._uploading_s = 0.0
        """Of the submission before: none can report its own."""
        self._doubted = ""
        """Token of the version whose weights were found damaged last."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> str:
        """Compute and submit until there is a reason to end, which is returned."""
        loaded = ""
        grant = self.member.lease(loaded)
        while not self.stop.is_set():
            if grant.weights:
                if not self._load_news(grant):
                    grant = self._doubt(grant.token)
                    continue
                loaded = grant.token
                self._usual_wait_s = time.perf_counter() - self._submitted_at if self._submitted_at else 0.0
            elif grant.answer == "leased":
                self._usual_wait_s = 0.0
            match grant.answer:
                case "stale":
                    try:
                        weights, grant = self.inbox.pull(grant.token)
                    except CodecError as error:
                        grant = self._doubt(grant.token, str(error))
                        continue
                    if grant.answer == "stale":
                        continue  # superseded while it was on its way
                    if weights is None:
                        grant = self._superseded(grant.token)
                        continue
                    self.replica.load(weights)
                    loaded = grant.token
                case "leased":
                    grant = self._work(grant) or self._waited(loaded)
                case "wait":
                    grant = self._wait(loaded, grant.ask_again_ms)
                case "fenced" | "banned" | "gone":
                    grant = self.member.lease(loaded)  # raises the reason
                case status:
                    return f"the job is {status}"
        return ASKED

    def _load_news(self, grant: Grant) -> bool:
        """Load the weights that came with the news of a version; False if they are damaged."""
        try:
            self.replica.load(self.inbox.decoded(grant))
        except CodecError:
            return False
        return True

    def _doubt(self, token: str, error: str = "they do not match its digest") -> Grant:
        """Tell that a version's weights are damaged, and read them again: at once, or, if that was of no use, once the
        reducer has published them again.
        """
        again, self._doubted = token == self._doubted, token
        log.warning("damaged weights", job=self.member.keys.job_id, version=Token.parse(token).version, error=error)
        self.member.doubt(token, again)
        self.inbox.forget()
        if again:
            self.member.wait(LONGEST_WAIT_MS)
        return self.member.lease("")

    def _superseded(self, token: str) -> Grant:
        """The next version, where the weights of one were let go of while they were read.

        Raises JobGone: there is none; the broker has lost them.
        """
        grant = self.member.lease("")
        if grant.answer == "stale" and grant.token == token:
            raise JobGone(f"the weights of version {token} are gone")
        return grant

    def _wait(self, loaded: str, ask_again_ms: int) -> Grant:
        """Sleep until the next version, or until it is worth asking for a lease again."""
        started = time.perf_counter()
        self._look_ahead(loaded)
        timeout_ms = min(ask_again_ms, LONGEST_WAIT_MS)
        if self.inbox.with_news:
            grant = self.member.wait_for(loaded, Waiting(timeout_ms, self.inbox.parts))
        else:
            token = self.member.wait(timeout_ms)
            grant = Grant("stale", token, 0, ()) if token and token != loaded else self.member.lease(loaded)
        self._waiting_s += time.perf_counter() - started
        return grant

    def _waited(self, loaded: str) -> Grant:
        """What the waiting that was begun with a submission ends with."""
        started = time.perf_counter()
        grant = self.member.waited(loaded)
        self._waiting_s += time.perf_counter() - started
        return grant

    def _look_ahead(self, loaded: str) -> None:
        """Assemble what may be leased of the next round, while there is nothing else to do."""
        if loaded:
            units = self._strategy.foreseen(self._plan, Token.parse(loaded).version + 1)
            self.replica.prefetch(units if len(units) <= AHEAD else ())

    def _work(self, grant: Grant) -> Grant | None:
        """Compute what was leased and submit it; None: waiting for the next version has begun."""
        self._memory.check_taken()
        self.status.version = Token.parse(grant.token).version
        self.outbox.begin()
        self.keeper.begin(grant.micro_batches, self.outbox.nonce)
        self.status.is_working = True
        try:
            seconds = self._compute(grant)
            if self.inbox.is_right():
                return self._submit(grant.token, seconds)
            self.outbox.drop()
            self._take_back()
            return self._doubt(grant.token)
        except Interrupted:
            self._take_back()
            return self.member.lease(grant.token)  # which says why
        finally:
            self.status.is_working = False
            self.keeper.end()

    def _take_back(self) -> None:
        """Do without the updates that were computed."""
        self.status.is_working = False  # what follows is not called off
        if self.feedback:
            self.feedback.go_back()
        self.outbox.forget()

    def _compute(self, grant: Grant) -> dict[str, float]:
        """Put the updates of what was leased into the outbox; returns where the time went.

        Raises Interrupted: there is no use in them.
        """
        started = time.perf_counter()
        outbox = self.outbox
        if self.feedback:
            self.feedback.mark()
        try:
            for unit in grant.micro_batches:
                take = outbox.taker(unit, self._plan.generator_seed(unit))
                update = self.replica.compute(unit, self.keeper.goes_on, grant.sizes, take)
                failpoint("after_compute")
                outbox.complete(unit, update.buffers, update.loss)
                self.status.samples += self._plan.unit_size(unit, grant.sizes)
        except BaseException:
            outbox.drop()
            raise
        computing_s = time.perf_counter() - started - outbox.encoding_s
        return {"waiting": self._waiting_s, "computing": computing_s, "encoding": outbox.encoding_s}

    def _submit(self, token: str, seconds: dict[str, float]) -> Grant | None:
        started = time.perf_counter()
        seconds["uploading"] = self._uploading_s
        report: dict[str, Any] = {
            "bytes_up": self.outbox.bytes,
            "bytes_down": self.inbox.bytes,
            "memory_bytes": self._memory.peak_bytes(),
            "seconds": {name: round(s, 6) for name, s in seconds.items()},
        }
        waiting = self._expected(token, seconds["computing"])
        self._waiting_s = 0.0
        receipt = when_there_is_room(lambda: self.outbox.submit(token, report, waiting), self.stop)
        self.status.is_working = False
        self._submitted_at = time.perf_counter()
        self._uploading_s = self._submitted_at - started - self._waiting_s
        self._remark(receipt, token)
        self.inbox.bytes = 0
        if receipt.outcome == "gone":
            raise JobGone(f"job {self.member.keys.job_id} is not open")
        if self.feedback and "accepted" not in (receipt.outcome, receipt.before):
            self.feedback.go_back()
        if waiting and receipt.outcome != "accepted":
            return self.member.lease(token)  # the next version may not be what comes next
        return receipt.grant

    def _remark(self, receipt: Receipt, token: str) -> None:
        """Say now and then in the log what went wrong with a submission, or took long."""
        job = self.member.keys.job_id
        if told := REMARKS.get(receipt.outcome):
            self._remarks.tell(log.warning, told, job=job, version=Token.parse(token).version)
        if self._uploading_s >= SLOW_UPLOAD_S:
            seconds, sent = round(self._uploading_s, 1), self.outbox.bytes
            self._remarks.tell(log.warning, "slow upload", job=job, seconds=seconds, bytes=sent)

    def _expected(self, loaded: str, computed_s: float) -> Waiting | None:
        """How to wait for the next version right after a submission; None if there may be more to do before.

        Args:
            computed_s: what the submission took to compute; where that is long, work is leased bit by bit.
        """
        more = self._strategy.takes_any or computed_s > ALL_AT_ONCE_S
        if not self.inbox.with_news or not self._usual_wait_s or more or self.stop.is_set():
            return None
        timeout_ms = min(max(SHORTEST_WAIT_MS, int(2000 * self._usual_wait_s)), LONGEST_WAIT_MS)
        return Waiting(timeout_ms, self.inbox.parts, partial(self._begin_to_wait, loaded))

    def _begin_to_wait(self, loaded: str) -> None:
        started = time.perf_counter()
        self._look_ahead(loaded)
        self._waiting_s += time.perf_counter() - started
