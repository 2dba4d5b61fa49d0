"""Reads each new version in a thread with a connection of its own, while the seat computes."""

import threading
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from computeshare.errors import CodecError, Interrupted
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors.layout import Weights
from computeshare.worker.seat.weights_receiver import Inbox

WAIT_MS = 1000
log = structlog.get_logger()


class VersionReader:
    """Holds the newest version that it has read and checked; other versions are read when they are asked for."""

    def __init__(self, session: WorkerSession, inbox: Inbox) -> None:
        """`session`: for the thread alone."""
        self._session, self._inbox = session, inbox
        self._held: tuple[str, Weights] | None = None
        self._lock = threading.Lock()  # of the inbox and what is held
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)

    @property
    def bytes(self) -> int:
        """Bytes of versions received so far."""
        return self._inbox.bytes

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

        Waits for the version that the thread is reading. Raises CodecError: they are damaged.

        Args:
            session: to read the version with, if it is not the one that is held.
        """
        with self._lock:
            weights = self._read(session, token)
            if weights is not None:
                load(weights)
            return weights is not None

    def forget(self) -> None:
        """Discard what is held: the next version starts from a whole snapshot."""
        with self._lock:
            self._held = None
            self._inbox.forget()

    def _read(self, session: WorkerSession, token: str) -> Weights | None:
        if self._held and self._held[0] == token:
            return self._held[1]
        self._held = None  # its memory may be written anew
        weights = self._inbox.fetch(session, token)
        self._held = (token, weights) if weights is not None else None
        return weights

    def _run(self) -> None:
        while not self.is_over:
            try:
                token = self._session.wait(WAIT_MS)
                if token:
                    with self._lock:
                        self._read(self._session, token)
            except Interrupted:
                return
            except (CodecError, RedisError) as error:  # whoever needs the version reads it again
                log.info("version not read ahead", job=self._session.keys.job_id, error=str(error))
                self._over.wait(WAIT_MS / 1000)
