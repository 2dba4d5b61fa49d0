"""A loop that sends and reads meanwhile: lease, load the version to compute on, compute, pass the updates on."""

import threading
import time
from collections.abc import Callable
from typing import Any

from computeshare.codecs.feedback import Feedback
from computeshare.codecs.messages import UpdateEncoder
from computeshare.codecs.registry import CODECS
from computeshare.errors import CodecError, Interrupted, JobGone
from computeshare.gossip.exchange import ExchangeReport, Partners
from computeshare.gossip.peer_replica import PeerReplica
from computeshare.gossip.peer_weights import PeerWeights
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.runtime.failpoints import failpoint
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.device_group.group import DeviceGroup
from computeshare.training.work_units import AnyReplica
from computeshare.types import Token
from computeshare.worker.seat.overlap.update_uploads import Upload, Uploads
from computeshare.worker.seat.overlap.version_reader import VersionReader
from computeshare.worker.seat.seat_context import SeatContext
from computeshare.worker.seat.seat_loop import AHEAD, ASKED, LONGEST_WAIT_MS, SeatStatus, doubt, report_of
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.seat.weights_receiver import WeightsReceiver

PATIENCE, PATIENCE_S = 3.0, 10.0
"""How long to wait in mid-unit for a version that does not come: so many times what the last units took, or so many
seconds if that is longer.
"""


class OverlappingLoop:
    """Takes part in the rounds of a job with a delay, or with peers, until the job or the seat ends.

    With a delay, a lease names the version to compute on: the current one for the next round, the one before for the
    current round. With an overlap units begin likewise, and go over to the version that their round starts from. A peer
    leases on the newest version that it has, as long as the broker takes updates computed on it.
    Updates are sent and versions are read by threads with connections of their own.
    """

    def __init__(
        self,
        spec: JobSpec,
        session: WorkerSession,
        devices: DeviceGroup,
        feedback: Feedback | None,
        versions: VersionReader,
        uploads: Uploads,
        memory: SeatMemory,
        status: SeatStatus,
        stop: threading.Event,
        peer: PeerReplica | None = None,
    ) -> None:
        """`peer`: the replica, where the strategy has peers."""
        self.session, self.devices, self.feedback = session, devices, feedback
        self.versions, self.uploads, self.status, self.stop = versions, uploads, status, stop
        self._strategy, self._plan, self._memory, self._peer = spec.strategy, spec.plan, memory, peer
        self.token = ""
        """Of the version that is being loaded, or was last."""
        self._loaded = ""
        self._waiting_s = 0.0
        self._switching_s = 0.0
        """Seconds that devices have spent waiting in mid-unit, of the units being computed."""
        self._switching = threading.Lock()  # of the session in mid-unit: each device computes in a thread of its own
        self._is_off, self._error = False, list[Exception]()
        """Whether a device did not get its version in mid-unit, and the error if that is no interruption."""
        self._units_s = 0.0
        """Seconds that the last leased units have taken."""
        self._uploading_s = 0.0
        """Seconds spent waiting for earlier updates to be sent."""
        self._missing, self._doubted = "", ""
        """Tokens of the last version whose weights were gone, and of the last whose weights were damaged."""
        self._bytes = 0
        """Bytes received that have been reported."""

    def run(self) -> str:
        """Compute until the job or the seat ends, and wait for the last updates to be sent. Returns the reason."""
        with self.versions, self.uploads:
            while not self.stop.is_set():
                self._prepare()
                began = time.perf_counter()
                grant = self.session.lease(self._loaded)
                self._waiting_s += time.perf_counter() - began
                match grant.answer:
                    case "leased":
                        self._work(grant)
                    case "wait":
                        self._wait(grant.ask_again_ms)
                    case "stale":
                        self._load(grant.token)
                    case status:
                        return f"the job is {status}"
        return ASKED

    def _prepare(self) -> None:
        """Of a peer: go back to the weights before updates that did not count, and take the newest version that is
        there as the reference.
        """
        if self._peer is None:
            return
        if lost := self.uploads.take_back():
            self._peer.go_back(lost)
        if newest := self.versions.newest:
            self._load(newest)

    def _wait(self, ask_again_ms: int) -> None:
        """Wait for the next version, or until it is time to ask for a lease again."""
        began = time.perf_counter()
        if self._loaded:
            version = Token.parse(self._loaded).version + 1 + self._strategy.lag
            units = self._strategy.foreseen(self._plan, version)
            self.devices.prefetch(units if len(units) <= AHEAD else ())
        self.session.wait(min(ask_again_ms, LONGEST_WAIT_MS))
        self._waiting_s += time.perf_counter() - began

    def _work(self, grant: Grant) -> None:
        """Compute the leased units, and have their updates sent."""
        self._memory.check_taken()
        began = time.perf_counter()
        before, upload = None, self.uploads.begin(grant.micro_batches, grant.token)
        self._uploading_s += time.perf_counter() - began
        if self.feedback:
            self.feedback.mark()
        try:
            if not self._load(grant.token):
                self._give_up(upload, grant)
                return
            self.status.version, self.status.is_working = Token.parse(grant.token).version, True
            before = self._peer.mark() if self._peer else None
            seconds = self._compute(grant, upload)
        except Interrupted:
            self._waiting_s += self._mean_switching_s()
            if self._strategy.early_steps:
                self._loaded = ""  # the devices hold what they were in the middle of
            if self.feedback:
                self.feedback.go_back()
            if self._peer and before:
                self._peer.go_back(before)
            self._give_up(upload, grant)
            if self._error:
                raise self._error.pop() from None
            return
        finally:
            self.status.is_working = False
        self.uploads.send(upload, self._report(upload, seconds), before)

    def _give_up(self, upload: Upload, grant: Grant) -> None:
        """Give the updates up, and hand back their leases; those of the submission being sent are kept."""
        self.uploads.give_up(upload)
        if grant.micro_batches:  # none would mean all
            self.session.release(grant.micro_batches)

    def _load(self, token: str) -> bool:
        """Load the version to compute on; False if it is not to be had.

        Raises JobGone: the broker has lost its weights.
        """
        if token == self._loaded:
            return True
        began = time.perf_counter()
        self._loaded, self.token = "", token
        found = self._give(token, self.devices.load)
        self._waiting_s += time.perf_counter() - began
        self._loaded = token if found else ""
        return found

    def _give(self, token: str, load: Callable[[Weights], object]) -> bool:
        """Pass a version's weights to `load`; False if they are not to be had. Raises JobGone: they are lost."""
        try:
            found = self.versions.give(self.session, token, load)
        except CodecError as error:
            again, self._doubted = token == self._doubted, token
            self.versions.forget()
            doubt(self.session, token, again, str(error))
            return False
        if not found and self._missing == token:
            raise JobGone(f"the weights of version {token} are gone")
        self._missing = "" if found else token
        return found

    def switch(self, version: int, load: Callable[[Weights], object], goes_on: Callable[[], bool]) -> None:
        """As `overlapped_replica.Switch`."""
        began, patience_s = time.perf_counter(), max(PATIENCE_S, PATIENCE * self._units_s)
        about = Token.parse(self._loaded).incarnation, version

        def is_wanted() -> bool:
            return goes_on() and not (self.stop.is_set() or self._is_off)

        try:
            token = self.versions.wait_for(*about, is_wanted, self._current, patience_s)
            with self._switching:
                if self._is_off or not self._give(token, load):
                    raise Interrupted(f"version {token} is not to be had")
        except Exception as error:
            self._is_off = True
            if isinstance(error, Interrupted):
                raise
            self._error.append(error)  # raised here, it would count as the device's
            raise Interrupted(str(error)) from error
        finally:
            with self._switching:
                self._switching_s += time.perf_counter() - began

    def _current(self) -> str:
        with self._switching:
            return self.session.current()

    def _mean_switching_s(self) -> float:
        """Seconds that each device has waited in mid-unit, from here on counted anew."""
        found, self._switching_s = self._switching_s / max(1, len(self.devices.working)), 0.0
        return found

    def _compute(self, grant: Grant, upload: Upload) -> dict[str, float]:
        """Compute the leased units' updates. Returns seconds by activity. Raises Interrupted: they are not wanted."""
        began = time.perf_counter()
        self._is_off = False

        def compute(replica: AnyReplica, unit: int) -> None:
            take = upload.outbox.taker(unit, self._plan.generator_seed(unit))
            update = replica.compute(unit, upload.keeper.goes_on, take)
            failpoint("after_compute")
            upload.outbox.complete(unit, update.buffers, update.loss)
            self.status.samples += self._plan.unit_size(unit)

        self.devices.compute(grant.micro_batches, compute)
        self.session.devices = len(self.devices.working)
        encoding_s = upload.outbox.encoding_s
        self._units_s, switching_s = time.perf_counter() - began, self._mean_switching_s()
        computing_s = max(0.0, self._units_s - encoding_s - switching_s)
        return {"waiting": self._waiting_s + switching_s, "computing": computing_s, "encoding": encoding_s}

    def _report(self, upload: Upload, seconds: dict[str, float]) -> dict[str, Any]:
        exchange = self._peer.report() if self._peer else ExchangeReport()
        seconds["uploading"] = self._uploading_s
        seconds["computing"] -= exchange.waited_s
        seconds["waiting"] += exchange.waited_s
        bytes_down = self.versions.bytes - self._bytes
        self._bytes += bytes_down
        self._waiting_s, self._uploading_s = 0.0, 0.0
        met = {"exchange": exchange.met} if exchange.met else {}
        return report_of(upload.outbox.bytes, bytes_down + exchange.bytes, self._memory, seconds) | met


def peer_of(seat: SeatContext, replica: AnyReplica, layout: Layout, token: Callable[[], str]) -> PeerReplica | None:
    """The replica with weights of its own, where the strategy has peers. `token`: of the version loaded last."""
    spec, averaging, worker = seat.spec, seat.spec.strategy.averaging, seat.seat.worker
    if averaging is None:
        return None
    source = PeerWeights.of_job(seat.redis, seat.seat.job, worker, seat.connections.open(seat.stop.is_set))
    partners = Partners(worker, spec.seed, averaging.matching)
    return PeerReplica(replica, averaging, source, partners, CODECS[spec.codecs.up], layout, token)


def overlapping_loop(
    seat: SeatContext,
    devices: DeviceGroup,
    feedback: Feedback | None,
    inbox: WeightsReceiver,
    encoder: UpdateEncoder,
    memory: SeatMemory,
    peer: PeerReplica | None,
    offers: bool,
) -> OverlappingLoop:
    """The loop, and what reads versions and sends updates meanwhile, each over connections of its own. `offers`: as of
    `UpdateQueue`.
    """
    versions: VersionReader
    uploads: Uploads
    up = seat.connections.open(lambda: uploads.are_called_off, paced=True, short=True)
    down = seat.connections.open(lambda: versions.is_over, short=True)
    versions = VersionReader(seat.session_over(down), inbox)
    uploads = Uploads(seat.session_over(up), encoder, seat.session, offers)
    about_seat = memory, seat.status, seat.stop
    return OverlappingLoop(seat.spec, seat.session, devices, feedback, versions, uploads, *about_seat, peer)
