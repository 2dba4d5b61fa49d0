"""Handles sleep of a worker's machine: hands leases back before it, or starts the seat over after it."""

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
"""Seconds that a seat may take to leave by itself before the machine sleeps: Linux delays sleep by at most 5 s."""
log = structlog.get_logger()


class Sleeper:
    """Ends a worker's seat before its machine sleeps, or after an unannounced sleep.

    Args:
        rq_worker: returns the RQ worker that runs seats now, if any.
        tell: registers the worker's present state; may raise RedisError or VersionError.
        redis: the connection for handing leases back. Neither it nor `tell` may wait long for an absent broker.
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
        """Called before the machine sleeps: ask the seat to leave, and end it after `BEFORE_SLEEP_S`."""
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
        """Called when the machine is awake again: the worker takes seats again."""
        self._minder.asleep = False
        with contextlib.suppress(RedisError, VersionError):
            self._tell()

    def look(self) -> None:
        """End the seat if the machine slept longer than `LONG_SLEEP_S`: its leases have expired, and its connections
        may be broken.
        """
        slept_s = self._naps.slept_s()
        if slept_s <= LONG_SLEEP_S:
            return
        self._minder.asleep = False  # even if the system does not report the waking
        rq_worker = self._rq_worker()
        if rq_worker and rq_worker.current_seat:
            log.warning("this machine slept: the seat starts over", slept_s=round(slept_s))
            self._drop_seat(rq_worker, "its machine slept")

    def _drop_seat(self, rq_worker: SeatWorker, reason: str) -> None:
        with contextlib.suppress(RedisError):  # then the leases expire by themselves
            rq_worker.drop_seat(reason, self._redis)
