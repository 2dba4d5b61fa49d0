"""Reads each new version in a thread with a connection of its own, while the seat computes."""

import threading
import time
from collections.abc import Callable, Sequence

import structlog
from redis.exceptions import RedisError

from computeshare.errors import CodecError, Interrupted
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors.layout import Weights
from computeshare.types import Token
from computeshare.worker.seat.weights_receiver import WeightsReceiver

WAIT_MS = 1000
ASK_S, CURRENT_S = 0.1, 1.0
KEPT = 2
"""Versions to keep: a round's units are computed on the version before the newest, the next round's on the newest."""
log = structlog.get_logger()


class VersionReader:
    """Holds the last two versions that it has read and checked; others are read when they are asked for.

    Of differences, a version older than the newest could only be had again by way of a whole snapshot.
    """

    def __init__(self, session: WorkerSession, inbox: WeightsReceiver) -> None:
        """`session`: for the thread alone; `inbox`: keeps `KEPT` versions."""
        self._session, self._inbox = session, inbox
        self._held: dict[str, Weights] = {}
        """By token, in the order in which they were read."""
        self._holding = threading.Lock()  # of what is held, also while it is loaded
        self._reading = threading.Lock()  # of the inbox; taken before `_holding`
        self._useful = KEPT if inbox.chained else 1
        """How many new versions to read: of differences the one before the newest is needed anyway."""
        self._told, self._telling = "", threading.Condition()
        """Token of the newest version that is known of."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)

    @property
    def bytes(self) -> int:
        """Bytes of versions received so far."""
        return self._inbox.bytes

    @property
    def newest(self) -> str:
        """Token of the newest version that is held; empty: none is."""
        with self._holding:
            return max(self._held, key=_order, default="")

    @property
    def is_over(self) -> bool:
        """Whether the thread is to end; interrupts its connection."""
        return self._over.is_set()

    def __enter__(self) -> "VersionReader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def give(self, session: WorkerSession, token: str, load: Callable[[Weights], object]) -> bool:
        """Pass a version's weights, which are valid during the call, to `load`; False if they are gone.

        Waits for the version that the thread is reading, unless the one asked for is held. Raises CodecError: they are
        damaged.

        Args:
            session: to read the version with, if it is not held.
        """
        if self._give_held(token, load):
            return True
        with self._reading:
            self._read(session, token)
            return self._give_held(token, load)

    def wait_for(
        self,
        incarnation: int,
        version: int,
        goes_on: Callable[[], bool],
        current: Callable[[], str],
        patience_s: float,
    ) -> str:
        """The token of a version, once it is committed.

        Args:
            goes_on: asked several times a second.
            current: gives the current version's token; asked once a second, as the thread may be reading another
                version, or have begun too late to be told of this one.
        Raises Interrupted: there is a later version; `goes_on` was false; or `patience_s` have passed: perhaps the
            version lacks a unit that is left for this worker to compute.
        """
        wanted, now = (incarnation, version), time.monotonic()
        until, asked = now + patience_s, now
        while not self._is_told(wanted):
            now = time.monotonic()
            if not goes_on() or now > until:
                raise Interrupted(f"version {version} does not come")
            if now > asked + CURRENT_S:
                asked = now
                self._tell([current()])
        if _order(self._told) > wanted:
            raise Interrupted(f"version {version} is outdated")
        return self._told

    def _is_told(self, wanted: tuple[int, int]) -> bool:
        """Whether this version or a later one is known of, after a short wait if need be."""
        with self._telling:
            return self._telling.wait_for(lambda: bool(self._told) and _order(self._told) >= wanted, ASK_S)

    def _tell(self, tokens: Sequence[str]) -> None:
        """Note that there are these versions."""
        with self._telling:
            self._told = max(filter(None, [self._told, *tokens]), key=_order, default="")
            self._telling.notify_all()

    def forget(self) -> None:
        """Discard what is held: the next version starts from a whole snapshot."""
        with self._reading, self._holding:
            self._held.clear()
            self._inbox.forget()

    def _give_held(self, token: str, load: Callable[[Weights], object]) -> bool:
        with self._holding:
            if (weights := self._held.get(token)) is None:
                return False
            load(weights)
            return True

    def _read(self, session: WorkerSession, token: str) -> None:
        """Read a version, unless it is held."""
        if token in self._held:
            return
        with self._holding:  # the memory of those before may be written anew
            self._held = dict([*self._held.items()][1 - KEPT :])
        try:
            weights = self._inbox.fetch(session, token)
            if weights is not None:
                with self._holding:
                    self._held[token] = weights
        finally:
            self._inbox.look_out(self.newest)

    def _run(self) -> None:
        while not self.is_over:
            try:
                tokens = self._session.announced(WAIT_MS)
                self._tell(tokens)
                for token in tokens[-self._useful :]:
                    with self._reading:
                        self._read(self._session, token)
            except Interrupted:
                return
            except (CodecError, RedisError) as error:  # whoever needs the version reads it again
                log.info("version not read ahead", job=self._session.keys.job_id, error=str(error))
                self._over.wait(WAIT_MS / 1000)


def _order(token: str) -> tuple[int, int]:
    """Versions ascend by this."""
    parsed = Token.parse(token)
    return parsed.incarnation, parsed.version
