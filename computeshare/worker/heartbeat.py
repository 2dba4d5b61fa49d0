"""A worker's heartbeat: registers its state every few seconds and carries out the control plane's orders."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
from redis import Redis
from redis.exceptions import RedisError

from computeshare.errors import VersionError
from computeshare.host.availability import Minder
from computeshare.protocol import handshake
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Orders, WorkerInfo, read_orders, register, unregister
from computeshare.queue.roster import HEARTBEAT_S
from computeshare.queue.seats import Seat
from computeshare.runtime.log_lines import Seldom
from computeshare.terminal.command import OTHER_VERSION, REMOVED
from computeshare.worker.rq_worker import SeatWorker
from computeshare.worker.sleep_guard import Sleeper
from computeshare.worker.status_file import CurrentJob, StatusFile, described

REMIND_S = 60.0
"""Seconds between log messages about one outage."""
LAST_BEAT_S = 1.0
"""Seconds that `stop` waits for the heartbeat under way."""
log = structlog.get_logger()


class Outage:
    """Logs an outage of the broker: at its start, then every `REMIND_S`, and at its end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seldom: Seldom | None = None

    def lasts(self, error: Exception) -> None:
        """Note that a heartbeat failed with this error: the outage begins or continues."""
        self._seldom = self._seldom or Seldom(REMIND_S, self._clock)
        what = "broker away" if isinstance(error, RedisError) else "no sign of life"
        if self._seldom.passes(what) is not None:
            log.warning(what, error=str(error) or type(error).__name__)

    def is_over(self) -> None:
        """Note that a heartbeat succeeded: the outage, if any, is over."""
        if self._seldom:
            self._seldom = None
            log.info("the broker hears this worker again")


class Heartbeat(threading.Thread):
    """The thread that registers the worker with its state and seat every `HEARTBEAT_S`, and that asks the seat to leave
    when the worker is to rest.

    Args:
        redis: a connection without retries.
        hasty: a connection without retries and with a short timeout, for use just before the machine sleeps.
        file: the worker's status, for its machine's owner.
    """

    def __init__(
        self,
        redis: Redis,
        hasty: Redis,
        worker: WorkerInfo,
        minder: Minder | None = None,
        file: StatusFile | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.redis, self.worker, self.minder = redis, worker, minder or Minder()
        self.sleeper = Sleeper(self.minder, lambda: self.rq_worker, lambda: self.beat(hasty), hasty)
        self.rq_worker: SeatWorker | None = None
        self.refusal: VersionError | None = None
        self.dismissed = False
        self.obeyed = Orders()
        self._file, self._job = file, ("", CurrentJob(id=""))
        self._outage = Outage()
        self._stop_request = threading.Event()
        self._registration = threading.Lock()  # no heartbeat registers the worker again once `stop` has unregistered it

    def run(self) -> None:
        while not self._stop_request.is_set():
            try:
                self.sleeper.look()
                self.minder.look()
                self.beat(self.redis)
                self._outage.is_over()
            except VersionError as refusal:  # the control plane was replaced or upgraded
                self.refusal = refusal
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except Exception as error:  # any error: the next heartbeat may succeed
                with contextlib.suppress(Exception):  # a log on a full disk
                    self._outage.lasts(error)
            if self.minder.resting and self.rq_worker:  # which the control plane knows by now
                self.rq_worker.ask_to_leave()
            self._stop_request.wait(HEARTBEAT_S)

    def beat(self, redis: Redis) -> None:
        """Register the worker once, then carry out new orders. Raises VersionError: the control plane has another
        version now; RedisError.
        """
        handshake.check(redis, "worker")
        seat, resting = self.rq_worker.current_seat if self.rq_worker else None, self.minder.resting
        state = "resting" if resting else "busy" if seat else "idle"
        power = self.minder.power
        told = replace(self.worker, seat=seat, state=state, resting=resting, power=power, device=self._device())
        with self._registration:
            if self._stop_request.is_set():
                return
            register(redis, told)
        self._show(redis, seat, state)
        self._obey(read_orders(redis, self.worker.id))

    def _device(self) -> str:
        """The worker's devices in words, and how many of them failed in this seat."""
        progress = self.rq_worker.link.progress if self.rq_worker else None
        if progress is None or not progress.stopped:
            return self.worker.device
        return f"{self.worker.device}, stopped: {', '.join(f'number {one}' for one in progress.stopped)}"

    def _show(self, redis: Redis, seat: str | None, state: str) -> None:
        """Write the status file. Raises RedisError."""
        if self._file is None:
            return
        if seat and self._job[0] != seat:
            job = RoundStore(redis, Seat.parse(seat).job)
            self._job = seat, described(job.job_id, job.spec(), job.creator())
        progress = self.rq_worker.link.progress if self.rq_worker else None
        reached: dict[str, object] = {}
        if progress:
            reached = {"version": progress.version, "rounds": progress.rounds, "name": progress.title}
            reached |= {"units": list(progress.units), "stopped": list(progress.stopped)}
        current = self._job[1].model_copy(update=reached) if seat else None
        self._file.write(state=state, resting=self.minder.resting, heard=time.time(), job=current)

    def _obey(self, orders: Orders) -> None:
        """Carry out new orders once: leave the seat, or leave for good. The seat finishes its work unit first."""
        if orders == self.obeyed:
            return
        if orders.dismissed and not self.dismissed:
            log.info("leaving for good", reason=orders.dismissed)
            self.dismissed = True  # before the signal, which may end this process soon
            os.kill(os.getpid(), signal.SIGTERM)
        elif orders.leave and self.rq_worker and orders.leave == self.rq_worker.current_seat:
            log.info("leaving a seat", seat=orders.leave)
            self.rq_worker.ask_to_leave()
        else:
            return
        self.obeyed = orders

    def exit_code(self) -> int:
        """This process's exit code, which tells a service manager whether to start the worker again."""
        if self.refusal:
            return OTHER_VERSION
        stopped = self._file is not None and self._file.is_asked_to_stop
        return REMOVED if self.dismissed or stopped else 0

    def stop(self) -> None:
        """Stop the heartbeat and unregister; a refused worker registers as refused instead, for the workers' page."""
        self._stop_request.set()
        if self.ident:
            self.join(LAST_BEAT_S)
        with self._registration, contextlib.suppress(RedisError):  # the registration expires by itself
            if self.refusal:
                register(self.redis, replace(self.worker, state="refused"))
            elif self.ident:  # else it has never registered
                unregister(self.redis, self.worker.id)
