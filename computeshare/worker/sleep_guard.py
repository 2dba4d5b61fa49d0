"""A worker whose machine sleeps: its leases go back before, or its seat starts over after."""

import contextlib
import threading
import time
from collections.abc import Callable

import structlog
from redis import Redis
from redis.exceptions import RedisError

from computeshare.errors import VersionError
from computeshare.host.availability import LONG_SLEEP_S, Minder, Naps
from computeshare.worker.rq_worker import SeatWorker

BEFORE_SLEEP_S = 2.0
"""How long a seat may take to leave by itself before the machine sleeps: Linux gives its processes 5 s in all."""
log = structlog.get_logger()


class Sleeper:
    """Takes a worker's seat away in time.

    Args:
        rq_worker: the one that runs seats now.
        tell: registers the worker as it is now; may raise RedisError or VersionError.
        redis: what leases are handed back over; neither it nor `tell` is to wait long for a broker that is away.
    """

    def __init__(
        self,
        minder: Minder,
        rq_worker: Callable[[], SeatWorker | None],
        tell: Callable[[], None],
        redis: Redis,
        naps: Naps | None = None,
    ) -> None:
        self._minder, self._rq_worker, self._tell, self._redis = minder, rq_worker, tell, redis
        self._naps = naps or Naps()

    def before(self) -> None:
        """The machine is about to sleep: give the leases back, politely at first."""
        self._minder.asleep = True
        tick, deadline = threading.Event(), time.monotonic() + BEFORE_SLEEP_S
        seat = None
        if rq_worker := self._rq_worker():
            seat = rq_worker.current_seat
            rq_worker.ask_to_leave()
        with contextlib.suppress(RedisError, VersionError):
            self._tell()
        while seat and (rq_worker := self._rq_worker()) and rq_worker.current_seat == seat:
            if time.monotonic() > deadline:
                self._drop_seat(rq_worker, "its machine sleeps")
                break
            rq_worker.ask_to_leave()
            tick.wait(0.05)

    def after(self) -> None:
        """The machine is awake again: take seats."""
        self._minder.asleep = False
        with contextlib.suppress(RedisError, VersionError):
            self._tell()

    def look(self) -> None:
        """End a seat that slept through the loss of its leases, and of its connections for all we know."""
        slept_s = self._naps.slept_s()
        if slept_s <= LONG_SLEEP_S:
            return
        self._minder.asleep = False  # whether or not anybody says so
        rq_worker = self._rq_worker()
        if rq_worker and rq_worker.current_seat:
            log.warning("this machine slept: the seat starts over", slept_s=round(slept_s))
            self._drop_seat(rq_worker, "its machine slept")

    def _drop_seat(self, rq_worker: SeatWorker, reason: str) -> None:
        with contextlib.suppress(RedisError):  # then they run out by themselves
            rq_worker.drop_seat(reason, self._redis)
