"""A worker's updates on their way: large ones are sent part by part while the rest is computed."""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import structlog
from redis.exceptions import OutOfMemoryError, RedisError

from computeshare.codecs.messages import UpdateEncoder
from computeshare.errors import Interrupted
from computeshare.protocol.worker_session import Member, Receipt, Waiting
from computeshare.types import Blob, Vector

AHEAD_BYTES = 256 << 10
"""A part that is smaller goes with the submission: an exchange of its own would cost more than it saves."""
log = structlog.get_logger()


class UpdateQueue:
    """The updates of what was leased together, from the first bucket that is ready to their submission.

    Those of several buckets are sent by a thread while they are computed: until `submit` or `drop` it alone may use the
    member's wire.
    """

    def __init__(self, member: Member, encoder: UpdateEncoder) -> None:
        self._member, self._encoder = member, encoder
        self._helper = ThreadPoolExecutor(1, "sending") if encoder.buckets > 1 else None
        self._sending: list[Future[None]] = []
        self.begin()

    def begin(self) -> None:
        """Have done with the updates before."""
        self.nonce = uuid.uuid4().hex
        """What they are to be submitted under."""
        self.encoding_s = 0.0
        self.bytes = 0
        """Of what was encoded."""
        self._messages: dict[int, list[Blob]] = {}
        self._losses: dict[int, float] = {}
        self._arrived: set[tuple[int, int]] = set()
        self._goes_ahead = self._helper is not None

    def taker(self, unit: int, seed: int) -> Callable[[int, Vector], None]:
        """What takes a unit's buckets as they become ready; they may change once it returns.

        Args:
            seed: the unit's.
        """
        message = self._messages[unit] = [b""] * self._encoder.parts

        def take(bucket: int, values: Vector) -> None:
            started = time.perf_counter()
            part = message[bucket] = self._encoder.bucket(bucket, values, seed)
            self.bytes += len(part)
            self.encoding_s += time.perf_counter() - started
            if self._helper and len(part) >= AHEAD_BYTES:
                self._sending.append(self._helper.submit(self._send, unit, bucket, part))

        return take

    def complete(self, unit: int, buffers: Vector, loss: float) -> None:
        """Take what a unit has beside its buckets."""
        part = self._messages[unit][-1] = self._encoder.buffers(buffers)
        self.bytes += len(part)
        self._losses[unit] = loss

    def submit(self, token: str, report: dict[str, Any], waiting: Waiting | None) -> Receipt:
        """Submit all of them, without the parts that have arrived; where the broker has no room, with these the next
        time: whoever holds parts there while waiting for room would hold up others that do.

        Args:
            waiting: begin to wait for the next version; None: ask for a lease.
        Raises OutOfMemoryError: the broker has no room; Interrupted.
        """
        self._settle()
        updates = [
            (unit, [None if (unit, i) in self._arrived else part for i, part in enumerate(parts)], self._losses[unit])
            for unit, parts in self._messages.items()
        ]
        try:
            return self._member.submit(token, self.nonce, updates, report, waiting is None, waiting)
        except OutOfMemoryError:
            self.forget()
            raise

    def drop(self) -> None:
        """Give them up; what is being sent is waited for, unless the wire is interrupted."""
        self._goes_ahead = False
        wait(self._sending)
        self._sending = []

    def forget(self) -> None:
        """Have the broker let go of what has arrived."""
        if units := {unit for unit, _ in self._arrived}:
            self._member.unstage(self.nonce, units)
        self._arrived.clear()

    def _settle(self) -> None:
        wait(self._sending)
        for sent in self._sending:
            if error := sent.exception():
                raise error
        self._sending = []

    def _send(self, unit: int, bucket: int, part: Blob) -> None:
        if not self._goes_ahead:
            return
        try:
            self._member.stage(self.nonce, unit, bucket, part)
            self._arrived.add((unit, bucket))
        except (RedisError, Interrupted) as error:  # what is left goes with the submission, or is of no use any more
            self._goes_ahead = False
            log.info("not sent ahead", micro_batch=unit, error=str(error))
