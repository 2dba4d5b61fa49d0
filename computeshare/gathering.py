"""A round's updates in a reducer: read in pieces, checked one by one, refused where they are not right."""

from collections.abc import Iterator, Sequence

import numpy as np

from computeshare.codecs import Codec
from computeshare.codecs.messages import decode_update, largest_update, update_parts
from computeshare.errors import CodecError, Diverged
from computeshare.layout import Layout
from computeshare.rounds import Claim, Fault, Received, RoundState, Suspicion
from computeshare.sampling import Plan, Round
from computeshare.strategies.sync import Mean
from computeshare.types import Message, Token, Vector

PIECE_BYTES = 1 << 20
"""Smaller updates are read several at a time, as many as are together of this size."""
NOT_FINITE_TIMES = 3
"""A micro-batch sent this often with values that are not finite by the only worker there is nobody's fault."""


class Refused(Exception):
    """Some of a round's updates were refused: the round goes on."""


class Gatherer:
    """Reads one job's updates."""

    def __init__(self, rounds: Claim, codec: Codec, layout: Layout, plan: Plan, bearable: int = 0) -> None:
        """`bearable`: how many bad workers the job's combination bears; 0 if none."""
        self.rounds, self.codec, self.layout, self.plan, self.bearable = rounds, codec, layout, plan, bearable
        self.limit = largest_update(layout)
        self._parts = update_parts(layout)
        self._update = np.empty(layout.parameters, np.float32)
        self._message = memoryview(bytearray())
        self.ahead: dict[tuple[str, int], Message] = {}
        """Messages that were read already."""

    def checked(self, base: RoundState, parts: dict[int, Received], buffers: Mean) -> Iterator[Vector]:
        """The updates in micro-batch order, each checked before it is given out; `buffers` adds up their buffers.

        One vector serves for all of them: what is given out holds until the next is asked for.

        Raises Refused: some were not what they should be (every one of the round has been looked at by then);
        Diverged: that is nobody's fault.
        """
        oversized = {m for m, part in parts.items() if part.size > self.limit}
        for m in sorted(oversized):
            reason = f"wrong length: {parts[m].size} bytes where at most {self.limit} are expected"
            self._refuse(base, parts[m], reason, "damaged")
        refused = bool(oversized)
        for m, message in self.messages([parts[m] for m in sorted(parts.keys() - oversized)]):
            try:
                update, buffer = self._decode(message, parts[m])
            except _Wrong as wrong:
                self._refuse(base, parts[m], wrong.reason, wrong.fault)
                refused = True
                continue
            if not refused:
                buffers.add(buffer, self.plan.unit_size(m, base.sizes))
                yield update
        if refused:
            raise Refused

    def messages(self, parts: Sequence[Received]) -> Iterator[tuple[int, Message | None]]:
        """The messages of these micro-batches, each until the next is asked for; None for one that is gone."""
        missing = [part for part in parts if (part.base, part.micro_batch) not in self.ahead]
        if not missing:
            yield from ((part.micro_batch, self.ahead[part.base, part.micro_batch]) for part in parts)
            return
        for some in _pieces(parts):
            into = [self._room(some[0].size)] if some[0].size > PIECE_BYTES else None
            wanted = [(part.base, part.micro_batch) for part in some]
            messages = self.rounds.updates(wanted, self._parts, into)
            yield from ((part.micro_batch, message) for part, message in zip(some, messages, strict=True))

    def decode(self, message: Message) -> tuple[Vector, Vector]:
        """A message's gradient (d,), until the next one is decoded, and buffers (b,). Raises CodecError."""
        return decode_update(self.codec, message, self.layout, self._update)

    def _room(self, size: int) -> memoryview:
        """Memory that is kept: fresh pages cost more than what is written into them."""
        if len(self._message) < size:
            self._message = np.empty(size, np.uint8).data
        return self._message

    def _decode(self, message: Message | None, part: Received) -> tuple[Vector, Vector]:
        if message is None:
            raise _Wrong("the broker has lost the blob", "lost")
        try:
            update, buffer = self.decode(message)
        except CodecError as error:
            raise _Wrong(str(error), "damaged") from error
        if not (np.isfinite(update).all() and np.isfinite(buffer).all() and np.isfinite(part.loss)):
            raise _Wrong("values that are not finite", "not_finite")
        return update, buffer

    def _refuse(self, base: RoundState, part: Received, reason: str, fault: Fault) -> None:
        found = self.rounds.refuse(base.token, part, reason, fault)
        if is_divergence(found, self.bearable):
            raise Diverged(
                f"diverged at version {base.version}: micro-batch {part.micro_batch} gave values that are not finite "
                f"{found.times} times, from {found.sessions} worker(s). Try a lower learning rate."
            )

    def expected(self, base: Token, following: Round) -> list[tuple[str, int]]:
        """The updates that are worth asking for before it is known that they have come."""
        if self.limit * following.total > PIECE_BYTES:
            return []
        return [(str(base), unit) for unit in following.units]


def _pieces(parts: Sequence[Received]) -> Iterator[list[Received]]:
    some: list[Received] = []
    for part in parts:
        if some and sum(one.size for one in some) + part.size > PIECE_BYTES:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def is_divergence(found: Suspicion, bearable: int) -> bool:
    """Whether values that are not finite are nobody's fault: workers agree on them, or nobody is there to disagree.

    Args:
        bearable: how many bad workers the job bears (0: unknown); where more than these sent some, honest ones did.
    """
    alone = found.there <= 1 and found.times >= NOT_FINITE_TIMES
    return found.sessions >= 2 or alone or (bearable > 0 and found.senders > bearable)


class _Wrong(Exception):
    """What is wrong with an update, and whose fault that is."""

    def __init__(self, reason: str, fault: Fault) -> None:
        super().__init__(reason)
        self.reason, self.fault = reason, fault
