"""Sends a worker's updates; parts of large updates are sent while the rest is computed."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import structlog
from redis.exceptions import OutOfMemoryError, RedisError

from computeshare.codecs.messages import UpdateEncoder
from computeshare.errors import Interrupted
from computeshare.protocol.worker_session import Receipt, Waiting, WorkerSession
from computeshare.types import Blob, Vector

AHEAD_BYTES = 256 << 10
"""Smallest part to send ahead; smaller parts go with the submission, which saves an exchange. Over a link of its own a
worker sends every part ahead, several in one exchange up to so many bytes.
"""
AT_ONCE_BYTES, AT_ONCE_S = 64 << 10, 0.05
"""More than so many bytes are not sent in one exchange if they took longer, so that the next version's parts, too, can
come down one after another.
"""
OFFERING_S = 0.01
"""Parts are offered if the last submission took as long to send: over a fast link an offer costs more than it saves."""
log = structlog.get_logger()


class UpdateQueue:
    """The updates of one lease, from the first finished bucket to their submission.

    If updates have several buckets, a thread sends finished buckets ahead; until `submit` or `drop`, only this thread
    may use the session's wire.
    """

    def __init__(
        self,
        session: WorkerSession,
        encoder: UpdateEncoder,
        helper: ThreadPoolExecutor | None = None,
        offers: bool = False,
    ) -> None:
        """`helper`: the only thread that uses the session's wire, `submit` included; by default a thread for buckets
        alone. `offers`: send all parts ahead, and tell the reducer of them, unless the link is fast.
        """
        self._session, self._encoder, self._offers = session, encoder, offers
        self._ready: deque[tuple[int, int, Blob]] = deque()
        """Unit, number and bytes of each part to be sent ahead."""
        self._helper = (helper or ThreadPoolExecutor(1, "sending")) if encoder.buckets > 1 else None
        self._sending: list[Future[None]] = []
        self._buffers_change = False
        """Whether buffers were found to change after they had been taken."""
        self._lock = threading.Lock()  # several devices encode with one encoder, whose feedback is the worker's
        self._at_once = AHEAD_BYTES
        """Parts that are ready are sent in one exchange until these are so many bytes."""
        self._is_slow = True
        """Whether the last submission took long to send, as far as is known."""
        self.begin()

    def begin(self, token: str = "") -> None:
        """Start a new submission, with a new nonce.

        Args:
            token: the version that the updates are computed on, if parts are offered.
        """
        self._token = token if self._offers and self._is_slow else ""
        self._sending_s = 0.0
        self.nonce = uuid.uuid4().hex
        """Nonce of the submission."""
        self.encoding_s = 0.0
        self.bytes = 0
        """Encoded bytes."""
        self._messages: dict[int, list[Blob]] = {}
        self._losses: dict[int, float] = {}
        self._arrived: dict[tuple[int, int], Blob | None] = {}
        """What has arrived of the parts, by unit and number; None: another worker has sent it."""
        self._shared: set[int] = set()
        """Units of which other workers send parts."""
        self._ready.clear()
        self._goes_ahead = self._helper is not None

    def taker(self, unit: int, seed: int) -> Callable[[int, Vector], None]:
        """A function that encodes a unit's buckets, and its buffers, as they become ready, and sends large ones ahead.

        Args:
            seed: seed for the codec's random rounding.
        """
        message = self._messages[unit] = [b""] * self._encoder.parts

        def take(index: int, values: Vector) -> None:
            if index == self._encoder.buckets and self._buffers_change:
                return
            with self._lock:
                started = time.perf_counter()
                part = message[index] = self._encoder.part(index, values, seed)
                self.bytes += len(part)
                self.encoding_s += time.perf_counter() - started
            if values.size:
                self._send_ahead(unit, index, part)

        return take

    def _send_ahead(self, unit: int, index: int, part: Blob) -> None:
        if self._helper and (self._token or len(part) >= AHEAD_BYTES):
            self._ready.append((unit, index, part))
            self._sending.append(self._helper.submit(self._send))

    def share(self, unit: int) -> None:
        """Note that other workers send parts of a unit's message, under this submission's nonce."""
        self._shared.add(unit)

    def arrived(self, unit: int, buckets: Iterable[int], count: int) -> None:
        """Note that other workers have sent these buckets, `count` bytes."""
        self._arrived.update(((unit, bucket), None) for bucket in buckets)
        self.bytes += count

    def complete(self, unit: int, buffers: Vector, loss: float) -> None:
        """Complete a unit's message with its buffers (b,) and its loss. Buffers that were taken are sent again if they
        have changed since, and from then on not taken before: backward passes that repeat a part of the forward pass
        change them.
        """
        with self._lock:
            message, part = self._messages[unit], self._encoder.buffers(buffers)
            taken = message[-1]
            self._losses[unit] = loss
            if part == taken:
                return
            self._buffers_change = self._buffers_change or bool(taken)
            message[-1] = part
            self.bytes += len(part)
        if buffers.size:
            self._send_ahead(unit, self._encoder.buckets, part)

    def submit(self, token: str, report: dict[str, Any], waiting: Waiting | None, and_lease: bool = True) -> Receipt:
        """Submit the updates, without the parts that were sent ahead.

        If the broker has no room, the parts sent ahead are deleted and sent again with the next attempt, so that
        workers that wait for room do not take room from one another.

        Args:
            waiting: begin to wait for the next version; None: ask for a lease, if `and_lease`.
        Raises: OutOfMemoryError: the broker has no room; Interrupted: likewise, and other workers had sent parts, which
            are gone.
        """
        self._settle()
        updates = [
            (unit, [self._left(unit, i, part) for i, part in enumerate(parts)], self._losses[unit])
            for unit, parts in self._messages.items()
        ]
        began = time.perf_counter()
        try:
            return self._session.submit(token, self.nonce, updates, report, and_lease and waiting is None, waiting)
        except OutOfMemoryError as error:
            self.forget()
            if self._shared:
                raise Interrupted("the broker has no room, so that the parts of other workers are gone") from error
            raise
        finally:
            self._is_slow = self._sending_s + time.perf_counter() - began >= OFFERING_S

    def drop(self) -> None:
        """Give the updates up: wait for the parts being sent, and send no others."""
        self._goes_ahead = False
        wait(self._sending)
        self._sending = []
        self._ready.clear()

    def forget(self) -> None:
        """Delete the parts sent ahead from the broker."""
        if units := {unit for unit, _ in self._arrived} | self._shared:
            self._session.unstage(self.nonce, units)
        self._arrived.clear()

    def _left(self, unit: int, index: int, part: Blob) -> Blob | None:
        """A part that is still to be sent; None: it has arrived."""
        is_there = (unit, index) in self._arrived and self._arrived[unit, index] in (None, part)
        return None if is_there else part

    def _settle(self) -> None:
        wait(self._sending)
        for sent in self._sending:
            if error := sent.exception():
                raise error
        self._sending = []

    def _send(self) -> None:
        """Send the parts that are ready, several of a unit in one exchange; an earlier call may have sent them."""
        while self._ready and self._goes_ahead:
            (unit, *_), parts = self._ready[0], dict[int, Blob]()
            while self._ready and self._ready[0][0] == unit and sum(map(len, parts.values())) < self._at_once:
                _, bucket, parts[bucket] = self._ready.popleft()
            began = time.perf_counter()
            try:
                self._session.stage(self.nonce, unit, parts, self._token)
                elapsed_s = time.perf_counter() - began
                self._sending_s += elapsed_s
                in_time = int(sum(map(len, parts.values())) / elapsed_s * AT_ONCE_S)
                self._at_once = min(AHEAD_BYTES, max(AT_ONCE_BYTES, in_time))
                self._arrived.update({(unit, bucket): part for bucket, part in parts.items()})
            except (RedisError, Interrupted) as error:  # the rest goes with the submission, if it is still wanted
                self._goes_ahead = False
                log.info("not sent ahead", micro_batch=unit, error=str(error))
