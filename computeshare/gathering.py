"""A round's updates in a reducer: read in pieces, checked one by one, refused where they are not right."""

from collections.abc import Iterator, Sequence

import numpy as np

from computeshare.codecs import Codec
from computeshare.codecs.messages import decode_update, largest_update
from computeshare.errors import CodecError, Diverged
from computeshare.layout import Layout
from computeshare.rounds import Claim, Fault, Received, RoundState, Suspicion
from computeshare.sampling import Plan
from computeshare.strategies.sync import Mean
from computeshare.types import Token, Vector

PIECE_BYTES = 16 << 20
"""Updates are read from the broker in pieces of about this size, at least one at a time."""
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

    def checked(self, base: RoundState, parts: dict[int, Received], buffers: Mean) -> Iterator[Vector]:
        """The updates in micro-batch order, each checked before it is given out; `buffers` adds up their buffers.

        Raises Refused: some were not what they should be (every one of the round has been looked at by then);
        Diverged: that is nobody's fault.
        """
        oversized = {m for m, part in parts.items() if part.size > self.limit}
        for m in sorted(oversized):
            reason = f"wrong length: {parts[m].size} bytes where at most {self.limit} are expected"
            self._refuse(base, parts[m], reason, "damaged")
        refused = bool(oversized)
        for m, blob in self.blobs(base.token, sorted(parts.keys() - oversized)):
            try:
                update, buffer = self._decode(blob, parts[m])
            except _Wrong as wrong:
                self._refuse(base, parts[m], wrong.reason, wrong.fault)
                refused = True
                continue
            if not refused:
                buffers.add(buffer, self.plan.size(m))
                yield update
        if refused:
            raise Refused

    def blobs(self, token: Token, numbers: Sequence[int]) -> Iterator[tuple[int, bytes | None]]:
        """The updates of these micro-batches; None for one that is gone."""
        piece = max(1, PIECE_BYTES // self.limit)
        for start in range(0, len(numbers), piece):
            some = numbers[start : start + piece]
            blobs = self.rounds.updates(token, some)
            for index, micro_batch in enumerate(some):
                blob, blobs[index] = blobs[index], None  # what was read may be let go
                yield micro_batch, blob

    def _decode(self, blob: bytes | None, part: Received) -> tuple[Vector, Vector]:
        if blob is None:
            raise _Wrong("the broker has lost the blob", "lost")
        try:
            update, buffer = decode_update(self.codec, blob, self.layout)
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
