"""Extends a seat's leases from a thread with its own connection, while the seat computes and sends."""

import threading

import structlog
from redis.exceptions import RedisError

from computeshare.protocol.worker_session import WorkerSession

EXTEND_S = 1.0
log = structlog.get_logger()


class LeaseKeeper:
    """Extends the leases that a seat works on, and learns from the replies whether the work is still wanted."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._over = threading.Event()
        self._work: tuple[int, ...] = ()
        self._nonce = ""
        self._status = "running"
        self._lock = threading.Lock()

    def __enter__(self) -> "LeaseKeeper":
        threading.Thread(target=self._keep, name="leases", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def begin(self, micro_batches: tuple[int, ...], nonce: str) -> None:
        """Begin to extend the leases on these units, and the life of parts staged for the submission `nonce`."""
        with self._lock:
            self._status, self._nonce, self._work = "running", nonce, micro_batches

    def end(self) -> None:
        """Stop extending leases; any that are left expire."""
        with self._lock:
            self._status, self._work = "running", ()

    def goes_on(self) -> bool:
        """Whether the work is still wanted, by the last reply."""
        return self._status == "running"

    def takes_more(self) -> bool:
        """Whether to go on sending. A lost lease does not stop it: an accepted submission ends its lease as well."""
        return self._status in ("running", "lost")

    def _keep(self) -> None:
        while not self._over.wait(EXTEND_S):
            if work := self._work:
                try:
                    status = self._session.extend(work, self._nonce)
                except RedisError as error:
                    log.warning("leases not extended", error=str(error))
                    continue
                with self._lock:
                    if self._work is work:  # else the reply is about earlier work
                        self._status = status
