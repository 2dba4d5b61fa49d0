"""Reads a round's updates bucket by bucket, decodes and checks each, and refuses the invalid ones."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import structlog

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import decode_bucket, largest_update, parts_of
from computeshare.codecs.registry import EXACT
from computeshare.errors import CodecError, Diverged
from computeshare.jobspec.quorum import largest_share, tolerated
from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.protocol.reducer_session import ReducerSession, StagedOffer
from computeshare.protocol.refusal import Fault, Received, Suspicion
from computeshare.protocol.round_store import RoundState
from computeshare.strategies.averages import Average
from computeshare.tensors.layout import Layout
from computeshare.types import Blob, Message, Token, Vector, machine_of

ROOM_BYTES = 4096
"""Bytes for the headers of a bucket's frames."""
PIECE_BYTES = 1 << 20
"""Smaller updates are read together, up to this many bytes per exchange."""
NOT_FINITE_TIMES = 3
"""If the only worker sends NaN or infinity for a micro-batch this often, training has diverged."""
_NOT_FINITE = "values that are not finite"
log = structlog.get_logger()


class Refused(Exception):
    """Some of a round's updates were refused; their units are leased again."""


class Altered(Exception):
    """An accepted update is invalid, or not the one that was read before it was accepted."""


class Gatherer:
    """Reads and checks one job's updates."""

    def __init__(
        self, session: ReducerSession, codec: Codec, layout: Layout, plan: Plan, helper: Executor, sharers: int = 0
    ) -> None:
        """`helper`: thread that reads ahead; `sharers`: as in `Terms`."""
        self.session, self.codec, self.layout, self.plan, self.sharers = session, codec, layout, plan, sharers
        self.tolerated = tolerated(sharers)
        """Number of malicious or faulty workers that the job's strategy tolerates."""
        self.limit = largest_update(layout)
        longest = max(layout.bucket_sizes)
        self._values = np.empty(longest, np.float32)
        self._room_bytes = min(self.limit, 4 * (longest + layout.buffers) + ROOM_BYTES)
        self._rooms = [self._room() for _ in range(2)]
        """Memory for the frames being decoded, and for the frames read meanwhile."""
        self._reading = _ReadAhead(self._read, helper)
        self.ahead: dict[tuple[str, int], Message] = {}
        """Messages read already, by base token and unit."""
        self.settled: Set[int] = frozenset()
        """Units of the round for which two machines sent the same; they are of no machine's share."""

    def checked(self, base: RoundState, parts: dict[int, Received], bucket: int, buffers: Average) -> Iterator[Vector]:
        """Yield one bucket of each update, in the order of units, decoded and checked.

        All share one vector: a yielded vector is valid until the next. With the last bucket, `buffers` also sums the
        updates' buffers.

        Raises: Refused: some updates were invalid and were refused, after this bucket of every update was checked;
            Diverged: their values are not finite through no worker's fault.
        """
        beyond = self._above_limits(parts, base.needed)
        for m, reason in beyond.items():
            self._refuse(base, parts[m], reason, "damaged")
        refused = bool(beyond)
        for m, frames in self._frames([parts[m] for m in sorted(parts.keys() - beyond.keys())], bucket):
            try:
                values, buffer = self._decode(frames, parts[m], bucket)
            except _Invalid as wrong:
                self._refuse(base, parts[m], wrong.reason, wrong.fault)
                refused = True
                continue
            if not refused:
                if bucket == len(self.layout.buckets) - 1:
                    buffers.add(buffer, self.plan.unit_size(m))
                yield values
        if refused:
            raise Refused

    def _above_limits(self, parts: dict[int, Received], needed: int) -> dict[int, str]:
        """The units whose updates break the job's terms, ascending, with the reason.

        `submit.lua` rejects such updates, but a worker could write to the broker without it.
        """
        share = self.share_of(needed)
        counts, found = Counter[str](), dict[int, str]()
        for m in sorted(parts):
            machine = machine_of(parts[m].worker)
            counts[machine] += m not in self.settled
            if parts[m].size > self.limit:
                found[m] = f"wrong length: {parts[m].size} bytes where at most {self.limit} are expected"
            elif counts[machine] > share:
                found[m] = f"more than a machine's share of a version that {self.sharers} must make: {share}"
        return found

    def share_of(self, needed: int) -> int:
        """The most units that a machine may make of a version of `needed` units."""
        return largest_share(needed, self.sharers or 1)

    def digest(self, update: tuple[str, int | str]) -> str | None:
        """The digest of an update's decoded values and buffers, or why they cannot be decoded; None if it is gone.

        `update` is named by base token and unit; a copy by `UNIT:copy`.
        """
        found = sha256()
        try:
            for bucket in range(len(self.layout.buckets)):
                (frames,) = self._read(_Wanted(bucket, (update,)))
                if isinstance(frames, CodecError):
                    raise frames
                if frames is None:
                    return None
                for values in self._decoded(frames, bucket):
                    found.update(values.data)
        except CodecError as error:
            return str(error)[:100]
        return found.hexdigest()

    def early(self, unit: int, source: Received | StagedOffer, part: int) -> tuple[Vector, bytes] | None:
        """One bucket of an update that may not be submitted yet, or after the buckets its buffers (b,), and the digest
        of the frame; None: it is not there.

        The vector is valid until the next part is decoded. Raises CodecError: the frame is invalid, or holds values
        that are not finite, which only an update that was submitted is refused for.
        """
        frame: Blob | None = None
        if isinstance(source, StagedOffer):
            frame = self.session.staged_part(unit, source, part, self._rooms[0])
        else:
            (found,) = self.session.updates([(source.base, unit)], range(part, part + 1), self._rooms[:1])
            if isinstance(found, CodecError):
                raise found
            frame = found[0] if found else None
        if frame is None:
            return None
        if part == len(self.layout.buckets):
            values = EXACT.decode(frame, self.layout.buffers)
        else:
            size = self.layout.bucket_sizes[part]
            values = self.codec.fitted(self.layout.pieces[part]).decode(frame, size, self._values[:size])
        if not np.isfinite(values).all():
            raise CodecError(_NOT_FINITE)
        return values, sha256(frame).digest()

    def confirm(self, base: RoundState, parts: dict[int, Received], digests: Mapping[int, Mapping[int, bytes]]) -> None:
        """Check accepted updates, some of whose parts `early` has read.

        Args:
            digests: for each part that was read, unit to the digest of its frame.
        Raises: Altered: one is invalid, or another than was read; nothing was refused.
        """
        if self._above_limits(parts, base.needed) or not all(math.isfinite(one.loss) for one in parts.values()):
            raise Altered
        for bucket in range(len(self.layout.buckets)):
            there = parts_of(self.layout, bucket)
            if digests.keys().isdisjoint(there):
                continue
            for m, frames in self._frames([parts[m] for m in sorted(parts)], bucket):
                if frames is None or isinstance(frames, CodecError):
                    raise Altered
                for part, frame in zip(there, frames, strict=True):
                    if part in digests and (frame is None or sha256(frame).digest() != digests[part][m]):
                        raise Altered

    def reread(self, update: tuple[str, int], bucket: int) -> Vector | None:
        """A bucket of a counted update (base token, unit), which `checked` accepted before; None if it is gone.

        The vector is valid until the next bucket is decoded. Raises CodecError.
        """
        (frames,) = self._read(_Wanted(bucket, (update,)))
        if isinstance(frames, CodecError):
            raise frames
        return None if frames is None else self._decoded(frames, bucket)[0]

    def _frames(self, parts: Sequence[Received], bucket: int) -> Iterator[tuple[int, Message | CodecError | None]]:
        """Yield each update's unit with its frames of this bucket; None if missing, CodecError if too long.

        The frames are valid until the next are read.
        """
        missing = [part for part in parts if (part.base, part.micro_batch) not in self.ahead]
        if not missing:
            wanted = parts_of(self.layout, bucket)
            yield from ((part.micro_batch, _pick(self.ahead[part.base, part.micro_batch], wanted)) for part in parts)
            return
        buckets = len(self.layout.buckets)
        pieces = [tuple((part.base, part.micro_batch) for part in some) for some in _pieces(parts, buckets)]
        coming = [_Wanted(b, names) for b in range(bucket, buckets)[:2] for names in pieces]
        for one, upcoming in zip(coming[: len(pieces)], [*coming[1:], None], strict=False):
            messages = self._reading.take(one, upcoming)
            yield from ((int(unit), message) for (_, unit), message in zip(one.names, messages, strict=True))

    def settle(self) -> None:
        """Stop reading ahead, and drop the frames that were read ahead."""
        self._reading.settle()

    def _read(self, wanted: "_Wanted") -> list[Message | CodecError | None]:
        self._rooms.reverse()
        into = self._rooms[:1] if len(wanted.names) == 1 else [self._room() for _ in wanted.names]
        return self.session.updates(wanted.names, parts_of(self.layout, wanted.bucket), into)

    def _room(self) -> memoryview:
        """Memory for a bucket's frames."""
        return np.empty(self._room_bytes, np.uint8).data

    def _decoded(self, frames: Message, bucket: int) -> tuple[Vector, Vector]:
        return decode_bucket(self.codec, frames, self.layout, bucket, self._values[: self.layout.bucket_sizes[bucket]])

    def _decode(self, frames: Message | CodecError | None, part: Received, bucket: int) -> tuple[Vector, Vector]:
        if isinstance(frames, CodecError):
            raise _Invalid(str(frames), "damaged")
        if frames is None and self.session.has_update(part.base, part.micro_batch):
            raise _Invalid(f"truncated: it has no frame for bucket {bucket}", "damaged")
        if frames is None:
            raise _Invalid("the broker has lost the blob", "lost")
        try:
            values, buffer = self._decoded(frames, bucket)
        except CodecError as error:
            raise _Invalid(str(error), "damaged") from error
        if not (np.isfinite(values).all() and np.isfinite(buffer).all() and np.isfinite(part.loss)):
            raise _Invalid(_NOT_FINITE, "not_finite")
        return values, buffer

    def _refuse(self, base: RoundState, part: Received, reason: str, fault: Fault) -> None:
        found = self.session.refuse(base.token, part, reason, fault)
        about = {"worker": part.worker, "micro_batch": part.micro_batch, "reason": reason}
        log.warning("refused an update", job=self.session.job_id, version=base.version, **about)
        if is_divergence(found, self.tolerated):
            workers = f"{found.machines} worker{'' if found.machines == 1 else 's'}"
            raise Diverged(
                f"Training diverged at version {base.version}: micro-batch {part.micro_batch} produced NaN or infinity "
                f"{found.times} times ({workers}). Try a lower learning rate."
            )

    def expected(self, base: Token, next_round: Round) -> list[tuple[str, int]]:
        """The updates (base token, unit) of the next round that are small enough to be read as they are found."""
        if self.limit * next_round.total > PIECE_BYTES:
            return []
        return [(str(base), unit) for unit in next_round.units]


def _pick(message: Message, wanted: range) -> Message:
    """The frames of a message with these indices."""
    return [message[index] for index in wanted]


def _pieces(parts: Sequence[Received], buckets: int) -> Iterator[list[Received]]:
    """Group updates of `buckets` buckets so that one bucket of a group is about `PIECE_BYTES`."""
    some: list[Received] = []
    for part in parts:
        if some and sum(one.size for one in some) + part.size > buckets * PIECE_BYTES:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def is_divergence(found: Suspicion, tolerated_workers: int) -> bool:
    """Whether values that are not finite mean divergence, not a bad worker: workers agree, or there is only one.

    Args:
        tolerated_workers: number of bad workers that the job tolerates (0: unknown); if more workers than these sent
            such values, some of the senders are honest; fewer prove nothing.
    """
    alone = found.there <= 1 and found.times >= NOT_FINITE_TIMES
    if tolerated_workers:
        return alone or found.senders > tolerated_workers
    return alone or found.machines >= 2


class RoundUpdates:
    """A round's updates, read bucket by bucket, and the average of their buffers."""

    def __init__(
        self,
        gatherer: Gatherer,
        base: RoundState,
        parts: dict[int, Received],
        average: Callable[[], Average],
        offsets: Mapping[int, Vector] | None = None,
    ) -> None:
        """`average`: makes an empty average for the updates' buffers; `offsets`: unit to a vector (d,) to be added to
        its update.
        """
        self._gatherer, self._base, self._parts, self._average = gatherer, base, parts, average
        self._offsets = offsets or {}
        self.buffers = average()
        """Average of the updates' buffers (b,); complete once the last bucket was read, even if buckets are read again.
        """

    def read(self, bucket: int) -> Iterator[Vector]:
        """`Gatherer.checked` for this round."""
        self.buffers = self._average()
        updates = self._gatherer.checked(self._base, self._parts, bucket, self.buffers)
        return self._moved(updates, self._gatherer.layout.buckets[bucket]) if self._offsets else updates

    def _moved(self, updates: Iterator[Vector], where: slice) -> Iterator[Vector]:
        """Add the offsets to a bucket of the updates."""
        for unit, values in zip(sorted(self._parts), updates, strict=True):
            yield values + self._offsets[unit][where] if unit in self._offsets else values


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A bucket of some updates, each named by base token and unit."""

    bucket: int
    names: tuple[tuple[str, int | str], ...]


class _ReadAhead:
    """Reads the next bucket in a helper thread while the caller works on the current bucket."""

    def __init__(self, read: Callable[[_Wanted], list[Message | CodecError | None]], helper: Executor) -> None:
        self._read, self._helper = read, helper
        self._coming: tuple[_Wanted, Future[list[Message | CodecError | None]]] | None = None

    def take(self, wanted: _Wanted, upcoming: _Wanted | None) -> list[Message | CodecError | None]:
        """Return the frames for `wanted`, and begin to read those for `upcoming`."""
        coming = self._coming
        if coming is None or coming[0] != wanted:
            self.settle()
            found = self._read(wanted)
        else:
            self._coming = None
            found = coming[1].result()
        if upcoming:
            self._coming = upcoming, self._helper.submit(self._read, upcoming)
        return found

    def settle(self) -> None:
        """Wait for the read in progress and drop its result."""
        if self._coming:
            wait([self._coming[1]])
        self._coming = None


class _Invalid(Exception):
    """An update is invalid; `fault` decides whether its sender gets a strike."""

    def __init__(self, reason: str, fault: Fault) -> None:
        super().__init__(reason)
        self.reason, self.fault = reason, fault
