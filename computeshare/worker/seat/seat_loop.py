"""A seat's loop, in the order of docs/protocol.md: pull the version and a lease, compute, submit, wait for the next."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from computeshare.bundles.exchange import FetchProgress
from computeshare.codecs.feedback import Feedback
from computeshare.errors import CodecError, Interrupted, JobGone
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import Grant, Receipt, Waiting, WorkerSession
from computeshare.runtime.failpoints import failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.tensors.layout import Weights
from computeshare.training.device_group.group import DeviceGroup
from computeshare.training.work_units import AnyReplica
from computeshare.transport.connections import when_there_is_room
from computeshare.types import Token
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.seat.update_sender import UpdateQueue

AHEAD = 8
"""Longest round, in units, whose batches are assembled ahead: of longer rounds, other workers lease most units."""
SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 20, 1000
"""Shortest and longest single wait for a new version; a request to leave is checked after each wait."""
ALL_AT_ONCE_S = 0.25
"""If a lease took longer to compute, the seat asks for another lease in the same round instead of waiting for the next
version: slow work is leased in small portions."""
SLOW_UPLOAD_S = 5.0
REMARKS = {
    "stale": "too late: another version is current",
    "lease_lost": "lease lost: another worker has the work",
    "fenced": "fenced: a newer session of this worker is there",
    "refused": "not taken: what was sent is gone or not whole",
}
"""Log messages for the outcomes of a submission."""
ASKED = "the worker was asked to leave"
log = structlog.get_logger()


@dataclass(slots=True)
class SeatStatus:
    """A seat's state, for its worker's display."""

    is_loaded: bool = False
    is_working: bool = False
    """Whether the seat computes or sends updates."""
    version: int = 0
    rounds: int = 0
    """Of the job, as far as that is chosen."""
    samples: int = 0
    fetched: FetchProgress | None = None
    """How far the seat has come with the files that the job needs; None: it fetched none."""
    units: Sequence[int] = ()
    """As `DeviceGroup.units` and `stopped`, which change; empty: no replicas are built."""
    stopped: Mapping[int, str] = field(default_factory=dict)


class WeightsNews(Protocol):
    """Weights that come with the notice of their version, as `WeightsReceiver` decodes them."""

    parts: int

    def decoded(self, grant: Grant) -> Weights: ...


class Versions(Protocol):
    """Where the weights of versions come from, as `WeightsReceiver`."""

    bytes: int

    @property
    def news(self) -> WeightsNews | None:
        """The decoder of weights that come with a notice; None: weights are read from the broker."""

    def pull(self, token: str) -> tuple[Weights | None, Grant]: ...
    def is_right(self) -> bool: ...
    def forget(self) -> None: ...
    def look_out(self, token: str) -> None: ...


def doubt(session: WorkerSession, token: str, again: bool, error: str) -> None:
    """Report a version's weights as damaged, so that they are read again: the first time at once, then (`again`) after
    the reducer has published them again.
    """
    log.warning("damaged weights", job=session.keys.job_id, version=Token.parse(token).version, error=error)
    session.doubt(token, again)
    if again:
        session.wait(LONGEST_WAIT_MS)


def report_of(bytes_up: int, bytes_down: int, memory: SeatMemory, seconds: dict[str, float]) -> dict[str, Any]:
    """The costs that a submission reports: bytes, memory, and `seconds` by activity."""
    rounded = {name: round(s, 6) for name, s in seconds.items()}
    return {"bytes_up": bytes_up, "bytes_down": bytes_down, "memory_bytes": memory.peak_bytes(), "seconds": rounded}


class SeatLoop:
    """Takes part in a job's rounds until the job or the seat ends."""

    def __init__(
        self,
        spec: JobSpec,
        session: WorkerSession,
        keeper: LeaseKeeper,
        devices: DeviceGroup,
        feedback: Feedback | None,
        inbox: Versions,
        outbox: UpdateQueue,
        memory: SeatMemory,
        status: SeatStatus,
        stop: threading.Event,
        about: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`about`: what else to say of a submission."""
        self.session, self.keeper, self.devices, self.inbox, self.outbox = session, keeper, devices, inbox, outbox
        self.feedback, self.status, self.stop = feedback, status, stop
        self._about = about
        self._strategy, self._plan, self._memory = spec.strategy, spec.plan, memory
        self._waiting_s = 0.0
        self._submitted_at = 0.0
        self._usual_wait_s = 0.0
        """Seconds from the last submission to the next version; 0: the round had more work for this seat."""
        self._uploading_s = 0.0
        """Upload time of the last submission, reported with the next."""
        self._doubted = ""
        """Token of the last version whose weights were damaged."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> str:
        """Compute and submit until the job or the seat ends. Returns the reason."""
        loaded = ""
        grant = self.session.lease(loaded)
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
                        continue  # superseded by a newer version during the download
                    if weights is None:
                        grant = self._superseded(grant.token)
                        continue
                    self.devices.load(weights)
                    loaded = grant.token
                case "leased":
                    grant = self._work(grant) or self._waited(loaded)
                case "wait":
                    grant = self._wait(loaded, grant.ask_again_ms)
                case "fenced" | "banned" | "gone":
                    grant = self.session.lease(loaded)  # raises the reason
                case status:
                    return f"the job is {status}"
        return ASKED

    def _load_news(self, grant: Grant) -> bool:
        """Load the weights that came with the notice of a version; False if they are damaged."""
        assert self.inbox.news, "it was asked for"
        try:
            self.devices.load(self.inbox.news.decoded(grant))
        except CodecError:
            return False
        return True

    def _doubt(self, token: str, error: str = "they do not match its digest") -> Grant:
        """Report a version's weights as damaged, and lease once they are to be read again."""
        again, self._doubted = token == self._doubted, token
        self.inbox.forget()
        doubt(self.session, token, again, error)
        return self.session.lease("")

    def _superseded(self, token: str) -> Grant:
        """Lease from the next version, because the weights of version `token` were deleted while they were read.

        Raises JobGone: there is no next version; the broker has lost the weights.
        """
        grant = self.session.lease("")
        if grant.answer == "stale" and grant.token == token:
            raise JobGone(f"the weights of version {token} are gone")
        return grant

    def _wait(self, loaded: str, ask_again_ms: int) -> Grant:
        """Wait for the next version, or until it is time to ask for a lease again."""
        started = time.perf_counter()
        self._look_ahead(loaded)
        timeout_ms = min(ask_again_ms, LONGEST_WAIT_MS)
        if news := self.inbox.news:
            grant = self.session.wait_for(loaded, Waiting(timeout_ms, news.parts))
        else:
            token = self.session.wait(timeout_ms)
            grant = Grant("stale", token, 0, ()) if token and token != loaded else self.session.lease(loaded)
        self._waiting_s += time.perf_counter() - started
        return grant

    def _waited(self, loaded: str) -> Grant:
        """Finish the wait for the next version that began with the submission."""
        started = time.perf_counter()
        grant = self.session.waited(loaded)
        self._waiting_s += time.perf_counter() - started
        return grant

    def _look_ahead(self, loaded: str) -> None:
        """Assemble the next round's batches while the seat is idle."""
        if loaded:
            units = self._strategy.foreseen(self._plan, Token.parse(loaded).version + 1)
            self.devices.prefetch(units if len(units) <= AHEAD else ())

    def _work(self, grant: Grant) -> Grant | None:
        """Compute the leased units and submit them. Returns None if the wait for the next version has begun."""
        self._memory.check_taken()
        self.status.version = Token.parse(grant.token).version
        self.outbox.begin(grant.token)
        self.inbox.look_out(grant.token)
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
            return self.session.lease(grant.token)  # its answer gives the reason
        finally:
            self.status.is_working = False
            self.keeper.end()

    def _take_back(self) -> None:
        """Discard the updates that were computed."""
        self.status.is_working = False  # so that the wire is not interrupted again
        self._go_back()
        self.outbox.forget()

    def _go_back(self) -> None:
        if self.feedback:
            self.feedback.go_back()

    def _compute(self, grant: Grant) -> dict[str, float]:
        """Compute the leased units' updates into the outbox. Returns seconds by activity.

        Raises Interrupted: the updates are no longer wanted.
        """
        started = time.perf_counter()
        outbox = self.outbox
        if self.feedback:
            self.feedback.mark()
        try:
            self.devices.compute(grant.micro_batches, self._compute_unit)
        except BaseException:
            outbox.drop()
            raise
        computing_s = max(0.0, time.perf_counter() - started - outbox.encoding_s)
        self.session.devices = len(self.devices.working)
        return {"waiting": self._waiting_s, "computing": computing_s, "encoding": outbox.encoding_s}

    def _compute_unit(self, replica: AnyReplica, unit: int) -> None:
        """Compute a unit's update with a device's replica, into the outbox. Called by several threads at once."""
        take = self.outbox.taker(unit, self._plan.generator_seed(unit))
        update = replica.compute(unit, self.keeper.goes_on, take)
        failpoint("after_compute")
        self.outbox.complete(unit, update.buffers, update.loss)
        self.status.samples += self._plan.unit_size(unit)

    def _submit(self, token: str, seconds: dict[str, float]) -> Grant | None:
        started = time.perf_counter()
        seconds["uploading"] = self._uploading_s
        report = report_of(self.outbox.bytes, self.inbox.bytes, self._memory, seconds) | self._about()
        waiting = self._expected(token, seconds["computing"])
        self._waiting_s = 0.0
        receipt = when_there_is_room(lambda: self.outbox.submit(token, report, waiting), self.stop)
        self.status.is_working = False
        self._submitted_at = time.perf_counter()
        self._uploading_s = self._submitted_at - started - self._waiting_s
        self._remark(receipt, token)
        self.inbox.bytes = 0
        if receipt.outcome == "gone":
            raise JobGone(f"job {self.session.keys.job_id} is not open")
        if "accepted" not in (receipt.outcome, receipt.before):
            self._go_back()
        if waiting and receipt.outcome != "accepted":
            return self.session.lease(token)  # the round may still have work for this seat
        return receipt.grant

    def _remark(self, receipt: Receipt, token: str) -> None:
        """Log failed and slow submissions; rate-limited."""
        job = self.session.keys.job_id
        if told := REMARKS.get(receipt.outcome):
            self._remarks.tell(log.warning, told, job=job, version=Token.parse(token).version)
        if self._uploading_s >= SLOW_UPLOAD_S:
            seconds, sent = round(self._uploading_s, 1), self.outbox.bytes
            self._remarks.tell(log.warning, "slow upload", job=job, seconds=seconds, bytes=sent)

    def _expected(self, loaded: str, computed_s: float) -> Waiting | None:
        """The wait for the next version to send along with a submission; None if the round may have more work.

        Args:
            computed_s: seconds that the submission took to compute.
        """
        more, news = self._strategy.takes_any or computed_s > ALL_AT_ONCE_S, self.inbox.news
        if not news or not self._usual_wait_s or more or self.stop.is_set():
            return None
        timeout_ms = min(max(SHORTEST_WAIT_MS, int(2000 * self._usual_wait_s)), LONGEST_WAIT_MS)
        return Waiting(timeout_ms, news.parts, partial(self._begin_to_wait, loaded))

    def _begin_to_wait(self, loaded: str) -> None:
        started = time.perf_counter()
        self._look_ahead(loaded)
        self._waiting_s += time.perf_counter() - started
