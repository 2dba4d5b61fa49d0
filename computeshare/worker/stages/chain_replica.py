"""A chain of workers as its leader sees it: one replica that computes whole units."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from redis.exceptions import OutOfMemoryError

from computeshare.codecs import frame
from computeshare.codecs.registry import EXACT
from computeshare.errors import CodecError, Interrupted
from computeshare.pipeline.chains.mail import DONE, ORDER, ChainMail, Letter, LetterInbox, LetterOutbox
from computeshare.pipeline.chains.placement import MALFORMED, Held
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.stage_replica import HeldStages, StageUpdate
from computeshare.tensors.layout import Weights
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Blob, Token, Vector
from computeshare.worker.seat.update_sender import UpdateQueue

TURN_BITS = 32
"""Of a turn, for the attempts of a placement."""
AGAIN_S = 0.5
"""Pause after an attempt that a full broker or a damaged message ended."""
LONGEST_SHARE = 1 << 20
"""Bytes of what a worker says of its part, besides buffers."""
COUNTS = "first", "stop", "mail_bytes", "memory_bytes", "sent_bytes"
log = structlog.get_logger()


def _count(number: Any) -> int:
    """A number that another worker wrote, whole. Raises ValueError, TypeError, OverflowError: it cannot be counted."""
    if not 0 <= (found := int(number)) < 1 << 62:
        raise ValueError(f"{str(number)[:20]} is no count")
    return found


@dataclass(frozen=True, slots=True)
class LeaderOrder:
    """A leader's order to the others of its chain: compute your stages of a unit, on a version."""

    placement: int
    leader: str
    token: str
    unit: int

    def dump(self) -> bytes:
        return json.dumps([self.placement, self.leader, self.token, self.unit]).encode()

    @classmethod
    def parse(cls, body: Blob) -> "LeaderOrder":
        """Raises CodecError: `body` is not a valid order."""
        try:
            placement, leader, token, unit = json.loads(bytes(body))
            return cls(_count(placement), str(leader), str(Token.parse(token)), _count(unit))
        except MALFORMED as error:
            raise CodecError("a leader's order is malformed") from error

    @classmethod
    def of(cls, letter: Letter) -> "LeaderOrder":
        """The order in a letter. Raises CodecError: it is not valid, or of another placement than the letter's turn."""
        order = cls.parse(letter.body)
        if letter.turn >> TURN_BITS != order.placement:
            raise CodecError("a leader's order is of another placement than its turn")
        return order


@dataclass(frozen=True, slots=True)
class StageShare:
    """One worker's share of a chain's work on a unit; `sent_bytes`: bytes sent as the worker's part of the update."""

    worker: str
    first: int
    stop: int
    busy_s: float
    mail_bytes: int
    memory_bytes: int
    loss: float | None = None
    sent_bytes: int = 0

    @classmethod
    def of(cls, held: Held, updates: Sequence[StageUpdate], memory_bytes: int, sent: int = 0) -> "StageShare":
        """From the updates of the stages that a worker holds."""
        losses = [one.loss for one in updates if one.loss is not None]
        busy_s = round(sum(one.busy_s for one in updates), 6)
        mail = sum(one.sent_bytes for one in updates)
        loss = losses[0] if losses else None
        return cls(held.worker, held.first, held.stop, busy_s, mail, memory_bytes, loss, sent)

    def dump(self, buffers: Vector) -> bytes:
        """Encode with the buffers (b,) of the worker's stages, joined."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return frame.join([json.dumps(fields).encode(), EXACT.encode(buffers)])

    @classmethod
    def parse(cls, body: Blob, buffers: int) -> "tuple[StageShare, Vector]":
        """Raises CodecError: it is malformed, or has another number of `buffers`."""
        about, values = frame.split(body, 2)
        try:
            said = json.loads(bytes(about[:LONGEST_SHARE]))
            first, stop, mail, memory, sent = (_count(said[name]) for name in COUNTS)
            busy_s, loss = float(said["busy_s"]), said["loss"]
            _count(busy_s)
            loss = None if loss is None else float(loss)
            share = cls(str(said["worker"]), first, stop, busy_s, mail, memory, loss, sent)
        except MALFORMED as error:
            raise CodecError("what a worker of the chain says of its stages is malformed") from error
        return share, EXACT.decode(values, buffers)


@dataclass
class ChainReplica:
    """Computes units with the other workers of a chain, of which this worker holds the first stages. A replica."""

    placement: int
    chain: Sequence[Held]
    own: HeldStages
    parts: Mapping[Held, StageParts]
    inbox: LetterInbox
    outbox: LetterOutbox
    queue: UpdateQueue
    token: Callable[[], str]
    """Of the version that was loaded last."""
    recalled: Callable[[], bool]
    memory_bytes: Callable[[], int]
    release: Callable[[], None]
    """Hands the lease on a unit back."""
    turns: Iterator[int]
    """Rising numbers, one for each attempt of this seat."""
    shares: list[StageShare] = field(default_factory=list)
    """Of the last unit, in the chain's order."""
    kept: None = None
    room: None = None
    compilation: Compilation = field(default_factory=Compilation)

    def load(self, weights: Weights) -> None:
        self.own.load(self.parts[self.chain[0]].views(weights))
        self._buffers = weights.buffers

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Do nothing."""

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """Order the others to compute their stages, compute the own ones, and wait for the others' reports.

        Raises Interrupted: the placement or the lease no longer holds, or another worker cannot compute its stages.
        """
        leader, *others = self.chain
        attempt = self.queue.nonce
        turn = (self.placement << TURN_BITS) + next(self.turns)
        self.inbox.begin(turn)
        self.queue.share(unit)
        order = LeaderOrder(self.placement, leader.worker, self.token(), unit).dump()

        def wanted() -> bool:
            return goes_on() and not self.recalled()

        mail = ChainMail(attempt, turn, self.chain, leader, self.inbox, self.outbox, wanted)
        try:
            for one in others:
                self.outbox.send(one.session, Letter(attempt, turn, one.first, ORDER, order))
            updates = self.own.compute(unit, mail, wanted, take)
            self.shares = [StageShare.of(leader, updates, self.memory_bytes())]
            buffers = self._buffers.copy()
            own = self.parts[leader]
            own.put_buffers(buffers, own.joined_buffers([one.buffers for one in updates]))
            for one in others:
                parts = self.parts[one]
                share, values = StageShare.parse(mail.receive(0, f"{DONE}{one.first}"), parts.buffer_count)
                parts.put_buffers(buffers, values)
                self.queue.arrived(unit, parts.own, share.sent_bytes + share.mail_bytes)
                self.shares.append(share)
            self.outbox.settle()
        except (OutOfMemoryError, CodecError) as error:
            log.warning("micro-batch not computed", unit=unit, error=str(error))
            self.outbox.drop()
            time.sleep(AGAIN_S)
            self.release()
            raise Interrupted(str(error)) from error
        except BaseException:
            self.outbox.drop()
            self.release()
            raise
        self.queue.arrived(unit, (), self.shares[0].mail_bytes)
        losses = [one.loss for one in self.shares if one.loss is not None]
        return Update(np.empty(0, np.float32), buffers, losses[0] if losses else float("nan"))

    def report(self) -> dict[str, Any]:
        """Details of a submission: the worker that computed each run of stages, and how long that worker was busy."""
        fields = ("worker", "first", "stop", "busy_s", "mail_bytes", "memory_bytes")
        return {"stages": [{name: getattr(one, name) for name in fields} for one in self.shares]}
