"""The context of a seat from its start to its end, and its training once it has joined."""

import os
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from redis import Redis

from computeshare.bundles.exchange import FetchProgress
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import WorkerSession
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.training.device_group.group import DeviceGroup
from computeshare.transport.connections import by_loopback
from computeshare.transport.rate_limit import Pacer, parse_rate
from computeshare.transport.wire import Wires
from computeshare.types import Kind
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.progress_pipe import SeatProgress
from computeshare.worker.seat.seat_loop import SeatStatus


class Ended(Exception):
    """The seat ends before it joins; the message is the reason."""


class SeatConnections:
    """A seat's connections to the broker, each for one of its threads."""

    def __init__(self, redis: Redis, max_up: str | None) -> None:
        """`max_up`: the owner's limit to what they send, as for `parse_rate`; empty: none."""
        self._redis, self._near = redis, by_loopback(redis)
        self._pacer = Pacer(parse_rate(max_up)) if max_up else None
        self._opened: list[Wires] = []

    def open(self, interrupt: Callable[[], bool] | None = None, paced: bool = False, short: bool = False) -> Wires:
        """Connections for one more thread; `interrupt` as for `Wire`. `paced`: they send updates, within the owner's
        limit; `short`: they carry short exchanges, too, which are faster by TCP if the broker is on this machine.
        """
        near, pacer = self._near if short else None, self._pacer if paced else None
        self._opened.append(Wires.to(self._redis, near, pacer=pacer, interrupt=interrupt))
        return self._opened[-1]

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that were sent and received over all of them."""
        return sum(one.bytes_sent for one in self._opened), sum(one.bytes_received for one in self._opened)


@dataclass(frozen=True, slots=True)
class SeatContext:
    """The context of a seat from its start to its end; `spec` is replaced once nothing in it is left open."""

    redis: Redis
    seat: Seat
    spec: JobSpec
    settings: Settings
    stop: threading.Event
    """Set when the seat is to leave."""
    session: WorkerSession
    keeper: LeaseKeeper
    connections: SeatConnections
    status: SeatStatus

    @classmethod
    def of(cls, redis: Redis, seat: Seat, spec: JobSpec, settings: Settings, stop: threading.Event) -> "SeatContext":
        """A seat with a new session, whose connections are interrupted while they send what is no longer wanted."""
        keeper: LeaseKeeper
        status, connections = SeatStatus(rounds=spec.rounds_total), SeatConnections(redis, settings.max_up)
        wires = connections.open(lambda: status.is_working and not keeper.takes_more(), paced=True, short=True)
        session_id = os.environ.get("RQ_EXECUTION_ID") or uuid.uuid4().hex
        session = WorkerSession(redis, seat.job, seat.worker, session_id, wires)
        keeper = LeaseKeeper(session)
        return cls(redis, seat, spec, settings, stop, session, keeper, connections, status)

    def session_over(self, wires: Wires) -> WorkerSession:
        """The same session over other connections, for another thread."""
        return WorkerSession(self.redis, self.seat.job, self.seat.worker, self.session.session_id, wires)

    def note_fetched(self, now: FetchProgress) -> None:
        """Note how far the job's files are here."""
        self.status.fetched = now

    def progress(self) -> SeatProgress:
        """This seat's progress, for the worker's display."""
        status, (sent, received) = self.status, self.connections.moved
        state = ("working" if status.is_working else "waiting") if status.is_loaded else "loading"
        files = status.fetched or FetchProgress(0, 0, 0, 0)
        moved = files.bytes_sent + sent, files.bytes_received + received
        lacking = (files.done_bytes, files.total_bytes) if files.done_bytes < files.total_bytes else (0, 0)
        about = self.spec.title, status.version, status.rounds, status.samples
        return SeatProgress(state, *about, *moved, *lacking, tuple(status.units), tuple(sorted(status.stopped)))


@dataclass(frozen=True, slots=True)
class Training:
    """A seat's training: the facts with which the seat joins, and the loop that it then runs."""

    kind: Kind
    """Of this machine, as it computes with the replicas."""
    frozen: str
    """Digest of the parameters that are not trained; empty: there are none."""
    loop: Callable[[], str]
    """Computes until the job or the seat ends, within `threads`. Returns the reason."""
    threads: tuple[AbstractContextManager[object], ...] = ()
    devices: DeviceGroup | None = None
    """May have an inner state to hand over; None: the seat holds stages."""
