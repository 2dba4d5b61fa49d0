"""A seat's submissions, each sent by a thread with a connection of its own while the next is computed."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import structlog
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import UpdateEncoder
from computeshare.errors import Interrupted
from computeshare.protocol.worker_session import WorkerSession
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.transport.connections import when_there_is_room
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.seat_loop import REMARKS, SLOW_UPLOAD_S
from computeshare.worker.seat.update_sender import UpdateQueue

log = structlog.get_logger()


class Upload:
    """A submission, from its leases to the broker's answer; used again for later ones."""

    def __init__(self, keeper: LeaseKeeper, outbox: UpdateQueue) -> None:
        self.keeper, self.outbox = keeper, outbox
        self.sent: Future[None] | None = None

    def begin(self, units: tuple[int, ...]) -> None:
        """Begin a submission for these leased units."""
        self.outbox.begin()
        self.keeper.begin(units, self.outbox.nonce)


class Uploads:
    """Two submissions in turn: one is sent while the other is computed, and no more updates are in memory.

    What an update that does not count has taken from the residual of a codec with error feedback is not given back,
    because later updates have been encoded since.
    """

    def __init__(self, session: WorkerSession, encoder: UpdateEncoder, keepers: WorkerSession) -> None:
        """`session`: for the thread that sends; `keepers`: extends leases."""
        self._thread, self._job = ThreadPoolExecutor(1, "uploads"), session.keys.job_id
        self._uploads = [Upload(LeaseKeeper(keepers), UpdateQueue(session, encoder, self._thread)) for _ in range(2)]
        self._closing, self._stop, self._remarks = ExitStack(), threading.Event(), Seldom(REMARK_EVERY_S)

    def __enter__(self) -> "Uploads":
        for upload in self._uploads:
            self._closing.enter_context(upload.keeper)
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is being sent; what cannot be sent any more is logged."""
        self._stop.set()
        self._thread.shutdown(wait=True)
        for upload in self._uploads:
            if upload.sent and (error := upload.sent.exception()):
                log.warning("updates not sent", job=self._job, error=str(error))
        self._closing.close()

    @property
    def are_called_off(self) -> bool:
        """Whether updates are no longer wanted, because the job does not run; interrupts the thread's connection."""
        return not all(upload.keeper.takes_more() for upload in self._uploads)

    def begin(self, units: tuple[int, ...]) -> Upload:
        """Begin a submission for these leased units, once the one before the last is sent. Raises its error."""
        self._uploads.reverse()
        upload = self._uploads[0]
        if upload.sent:
            sent, upload.sent = upload.sent, None
            sent.result()
        upload.begin(units)
        return upload

    def send(self, upload: Upload, token: str, report: dict[str, Any]) -> None:
        """Have the thread submit the updates, computed on version `token`."""
        upload.sent = self._thread.submit(self._send, upload, token, report)

    def give_up(self, upload: Upload) -> None:
        """Give the updates up: stop extending their leases, and delete what was sent of them."""
        upload.outbox.drop()
        upload.keeper.end()
        upload.sent = self._thread.submit(self._forget, upload)

    def _send(self, upload: Upload, token: str, report: dict[str, Any]) -> None:
        began = time.perf_counter()
        try:
            receipt = when_there_is_room(lambda: upload.outbox.submit(token, report, None, and_lease=False), self._stop)
        except (Interrupted, OutOfMemoryError):
            self._forget(upload)
            return
        finally:
            upload.keeper.end()
        if told := REMARKS.get(receipt.outcome):
            self._remarks.tell(log.warning, told, job=self._job)
        if (seconds := time.perf_counter() - began) >= SLOW_UPLOAD_S:
            self._remarks.tell(log.warning, "slow upload", job=self._job, seconds=round(seconds, 1))

    def _forget(self, upload: Upload) -> None:
        try:
            upload.outbox.forget()
        except Interrupted:  # the other submission is called off as well; what was sent of this one expires
            log.info("not deleted", job=self._job)
