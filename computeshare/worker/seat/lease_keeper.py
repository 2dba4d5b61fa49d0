"""A seat's leases while it computes and sends: a thread and a connection of their own keep them."""

import threading

import structlog
from redis.exceptions import RedisError

from computeshare.protocol.worker_session import Member

EXTEND_S = 1.0
log = structlog.get_logger()


class LeaseKeeper:
    """Keeps the leases that a seat works on, and hears meanwhile that the job ends or others have done the work."""

    def __init__(self, member: Member) -> None:
        self._member = member
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
        """Keep the leases on these from now on, and what has been sent of them ahead of the submission `nonce`."""
        with self._lock:
            self._status, self._nonce, self._work = "running", nonce, micro_batches

    def end(self) -> None:
        """Let the others run out, should there be any that the seat does not know of."""
        self._work = ()

    def goes_on(self) -> bool:
        """Whether there is any use in going on with the work, as far as is known."""
        return self._status == "running"

    def takes_more(self) -> bool:
        """Whether there is any use in sending what was done: a lease is over once its submission is taken, too."""
        return self._status in ("running", "lost")

    def _keep(self) -> None:
        while not self._over.wait(EXTEND_S):
            if work := self._work:
                try:
                    status = self._member.extend(work, self._nonce)
                except RedisError as error:
                    log.warning("leases not extended", error=str(error))
                    continue
                with self._lock:
                    if self._work is work:  # else it was said of what came before
                        self._status = status
