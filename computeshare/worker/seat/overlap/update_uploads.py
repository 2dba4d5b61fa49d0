"""A seat's submissions, each sent by a thread with a connection of its own while the next is computed."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import structlog
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import UpdateEncoder
from computeshare.errors import Interrupted
from computeshare.gossip.peer_replica import Mark
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
        self.units: tuple[int, ...] = ()
        self.token = ""
        """Of the version that these units are computed on."""
        self.before: Mark | None = None
        """Of a peer: its weights before these units, in case they do not count."""

    def begin(self, units: tuple[int, ...], token: str) -> None:
        """Begin a submission for these leased units, to be computed on version `token`."""
        self.units, self.token = units, token
        self.outbox.begin(token)
        self.keeper.begin(units, self.outbox.nonce)


class Uploads:
    """Two submissions in turn: one is sent while the other is computed, and no more updates are in memory.

    What an update that does not count has taken from the residual of a codec with error feedback is not given back,
    because later updates have been encoded since. A peer's weights contain all of its earlier updates, so where one of
    a peer's does not count, those after it are not sent.
    """

    def __init__(
        self, session: WorkerSession, encoder: UpdateEncoder, keepers: WorkerSession, offers: bool = False
    ) -> None:
        """`session`: for the thread that sends; `keepers`: extends leases; `offers`: as of `UpdateQueue`."""
        self._session, self._thread = session, ThreadPoolExecutor(1, "uploads")
        outboxes = [UpdateQueue(session, encoder, self._thread, offers) for _ in range(2)]
        self._uploads = [Upload(LeaseKeeper(keepers), outbox) for outbox in outboxes]
        self._lost: Mark | None = None
        """Of a peer: its weights before the first update that did not count, until it has gone back."""
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
                log.warning("updates not sent", job=self._session.keys.job_id, error=str(error))
        self._closing.close()

    @property
    def are_called_off(self) -> bool:
        """Whether updates are no longer wanted, because the job does not run; interrupts the thread's connection."""
        return not all(upload.keeper.takes_more() for upload in self._uploads)

    def begin(self, units: tuple[int, ...], token: str) -> Upload:
        """Begin a submission for these leased units, to be computed on version `token`, once the one before the last is
        sent. Raises its error.
        """
        self._uploads.reverse()
        upload = self._uploads[0]
        if upload.sent:
            sent, upload.sent = upload.sent, None
            sent.result()
        upload.begin(units, token)
        return upload

    def send(self, upload: Upload, report: dict[str, Any], before: Mark | None = None) -> None:
        """Have the thread submit the updates; `before`: a peer's weights without them."""
        upload.before = before
        upload.sent = self._thread.submit(self._send, upload, report)

    def take_back(self) -> Mark | None:
        """A peer's weights before the first update that did not count, once nothing is being sent; None: all count."""
        if self._lost is None:
            return None
        wait([upload.sent for upload in self._uploads if upload.sent])
        lost, self._lost = self._lost, None
        return lost

    def give_up(self, upload: Upload) -> None:
        """Give the updates up: stop extending their leases, and delete what was sent of them."""
        upload.outbox.drop()
        upload.keeper.end()
        upload.sent = self._thread.submit(self._forget, upload)

    def _send(self, upload: Upload, report: dict[str, Any]) -> None:
        if self._lost and upload.before and self._lost.incarnation == upload.before.incarnation:
            upload.keeper.end()
            self._forget(upload)
            self._session.release(upload.units)
            return
        began = time.perf_counter()
        try:
            submit = partial(upload.outbox.submit, upload.token, report, None, and_lease=False)
            receipt = when_there_is_room(submit, self._stop)
        except (Interrupted, OutOfMemoryError):
            self._lost = upload.before
            self._forget(upload)
            return
        except BaseException:  # raised by `begin`; until then nothing that contains these units may count
            self._lost = upload.before
            raise
        finally:
            upload.keeper.end()
        if "accepted" not in (receipt.outcome, receipt.before):
            self._lost = upload.before
        if told := REMARKS.get(receipt.outcome):
            self._remarks.tell(log.warning, told, job=self._session.keys.job_id)
        if (seconds := time.perf_counter() - began) >= SLOW_UPLOAD_S:
            self._remarks.tell(log.warning, "slow upload", job=self._session.keys.job_id, seconds=round(seconds, 1))

    def _forget(self, upload: Upload) -> None:
        try:
            upload.outbox.forget()
        except Interrupted:  # the other submission is called off as well; what was sent of this one expires
            log.info("not deleted", job=self._session.keys.job_id)
