"""The control plane's background loops. Of several control planes, the holder of a lock in Redis runs them."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from redis import Redis
from redis.exceptions import LockError, RedisError
from redis.lock import Lock
from sqlalchemy.exc import OperationalError

from api.broker import Broker
from api.database import Database
from api.logs.collector import Collector
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from api.system.backups import Backups
from api.system.copies import Copies
from api.system.unused_bundles import UnusedBundles
from api.webhooks.notifier import Notifier
from computeshare.bundles.piece_server import PieceServer
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.offers import Offers
from computeshare.errors import ComputeShareError
from computeshare.protocol.keys import CONTROL_LOCK
from computeshare.runtime.signatures import SigningKey

LOCK_S = 5.0
DISPATCH_S = 1.0
PROJECT_S = 0.25
COLLECT_S = NOTIFY_S = 0.5
BACKUP_S = COPY_S = 5.0
IDLE_S = 1.0
LONGEST_PAUSE_S = 5.0
SILENT_S = 15.0
"""Seconds without a finished turn after which a loop counts as stuck."""
BACKUP_SILENT_S = 3600.0
"""The same limit for the loops `backup` and `copies`: copying much takes minutes."""

log = structlog.get_logger()


@dataclass(slots=True)
class Loop:
    """A background loop and its health: turns done, failures in a row, last error."""

    name: str
    interval_s: float
    turn: Callable[[], object]
    silent_s: float = SILENT_S
    turns: int = 0
    failures: int = 0
    trouble: str | None = None
    done_at: float = field(default_factory=time.monotonic)

    def pause_s(self) -> float:
        """Seconds to the next turn: `interval_s`, or after failures a random pause, doubled with each failure."""
        if not self.failures:
            return self.interval_s
        return random.uniform(0.1, min(LONGEST_PAUSE_S, 0.2 * 2 ** min(self.failures, 10)))


class Background:
    """Starts, runs and stops the background loops, a thread each."""

    def __init__(
        self,
        database: Database,
        broker: Broker,
        artifacts_dir: Path,
        notifier: Notifier,
        bundles: BundleStore,
        copy_to: str | None = None,
        key: SigningKey | None = None,
    ) -> None:
        """`copy_to`: the address to which checkpoints are copied; None: nowhere. `key`: it signs seats and recipes."""
        self._broker = broker
        self._notifier = notifier
        offers = Offers(bundles)
        self._dispatcher = Dispatcher(database, artifacts_dir, key, offers)
        self._projector = Projector(database, artifacts_dir)
        self._collector = Collector(database)
        self._stop = threading.Event()
        self._backups = Backups(database.file, self._stop)
        self._pieces = PieceServer(offers)
        self._unused_bundles = UnusedBundles(database, bundles)
        self._copies = Copies(database, artifacts_dir, copy_to, self._stop)
        self._wake = threading.Event()
        self._leading = threading.Event()
        self._lock: Lock | None = None
        self.loops = (
            Loop("dispatcher", DISPATCH_S, self._dispatch),
            Loop("projector", PROJECT_S, self._project),
            Loop("logs", COLLECT_S, self._collect),
            Loop("notifier", NOTIFY_S, self._notify),
            Loop("bundles", 0.0, self._serve_pieces),
            Loop("backup", BACKUP_S, self._back_up, BACKUP_SILENT_S),
            Loop("copies", COPY_S, self._copy, BACKUP_SILENT_S),
        )
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=loop.name, daemon=True) for loop in self.loops
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the loops after their turns, and release the lock, so that another control plane takes over at once."""
        self._stop.set()
        self._wake.set()
        if self.leading:
            with contextlib.suppress(RedisError, ComputeShareError):
                self._pieces.wake(self._broker.client())
        for thread in self._threads:
            thread.join(timeout=10)
        self._dispatcher.rest()
        self._notifier.close()
        if self._lock:
            with contextlib.suppress(RedisError, LockError):  # it expires by itself
                self._lock.release()

    def wake(self) -> None:
        """Make the dispatcher look at the outbox now."""
        self._wake.set()

    def trouble(self) -> str | None:
        """The first loop's trouble, as its name and error or silence; None if all loops work."""
        for loop in self.loops:
            if loop.trouble:
                return f"{loop.name}: {loop.trouble}"
            if (silent_s := time.monotonic() - loop.done_at) > loop.silent_s:
                return f"{loop.name}: no turn finished for {silent_s:.0f} s"
        return None

    @property
    def leading(self) -> bool:
        """Whether this process holds the lock and runs the loops; if not, it only answers requests."""
        return self._leading.is_set()

    def _run(self, loop: Loop) -> None:
        while not self._stop.is_set():
            try:
                loop.turn()
                loop.turns += 1
                loop.failures, loop.trouble, loop.done_at = 0, None, time.monotonic()
            except Exception as error:  # a loop survives any error: the next turn does the missing work
                loop.failures += 1
                loop.trouble = str(error)[:300] or type(error).__name__
                expected = isinstance(error, RedisError | OperationalError | ComputeShareError)
                if not expected or loop.failures == 1:
                    log.warning("turn failed", loop=loop.name, error=loop.trouble, exc_info=None if expected else error)
            if loop.name == "dispatcher":
                self._wake.wait(loop.pause_s())
                self._wake.clear()
            else:
                self._stop.wait(loop.pause_s())

    def _dispatch(self) -> None:
        redis = self._broker.client()
        if self._lead(redis):
            self._dispatcher.step(redis)
        else:
            self._dispatcher.rest()

    def _project(self) -> None:
        if self.leading:
            self._projector.step(self._broker.client())

    def _collect(self) -> None:
        if self.leading:
            self._collector.step(self._broker.client())

    def _notify(self) -> None:
        dispatcher = self.loops[0]
        if self.leading or dispatcher.failures:  # without a broker no process leads, and webhooks need no broker
            self._notifier.step()

    def _serve_pieces(self) -> None:
        if self.leading:
            self._pieces.step(self._broker.client())
        else:
            self._stop.wait(IDLE_S)

    def _back_up(self) -> None:
        if self.leading:
            self._backups.step()
            self._unused_bundles.step()

    def _copy(self) -> None:
        if self.leading:
            self._copies.step()

    def _lead(self, redis: Redis) -> bool:
        """Keep or acquire the lock; returns whether this process holds it. (The lock only saves work: correctness does
        not depend on it.)
        """
        if self._lock is not None and self._lock.redis is redis:
            try:
                self._lock.reacquire()
                return True
            except LockError:
                log.warning("lost the lock")
        lock = Lock(redis, CONTROL_LOCK, timeout=LOCK_S, blocking=False, thread_local=False)
        if lock.acquire():
            self._lock = lock
            self._leading.set()
            return True
        redis.pexpire(CONTROL_LOCK, int(LOCK_S * 1000), lt=True)  # the broker's clock may have been set back
        self._lock = None
        self._leading.clear()
        return False
