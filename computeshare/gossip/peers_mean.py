"""The mean of the workers' newest weights, which makes the version where workers have weights of their own.

The newest weights of a peer with units in the round are in its newest unit. A slower peer has no unit in the round: its
newest weights are those that other peers read.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import decode_update, largest_update, update_parts
from computeshare.errors import CodecError, LostClaim
from computeshare.gossip.peer_weights import PublishedNotice
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.strategies.averages import square
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Token, Vector

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Absent:
    """The peers that have no unit in a round."""

    update: Vector
    """The version's parameters minus the mean of these peers' (d,)."""
    buffers: Vector
    """The mean of their buffers (b,)."""
    count: int = 0
    square: float = 0.0
    """Sum over these peers of the squared distance from their mean."""

    def after(self, updates: Iterable[Vector], where: slice) -> Iterator[Vector]:
        """A bucket of the round's updates, then of these peers' mean, if there are any."""
        yield from updates
        if self.count:
            yield self.update[where]


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest weights of each peer, as differences from the version from which the round started."""

    parts: dict[int, Received]
    """By unit, the newest update of each peer that has any in the round."""
    offsets: dict[int, Vector]
    """Unit to the vector (d,) that makes its update, which is on an earlier reference, one on that version."""
    absent: Absent

    @property
    def counts(self) -> list[int]:
        """How many peers each update stands for: one, and the last for all that are absent."""
        return [1] * len(self.parts) + [self.absent.count] * bool(self.absent.count)


class PeersMean:
    """Finds the newest weights of a job's peers, round by round."""

    def __init__(
        self,
        session: ReducerSession,
        layout: Layout,
        codec: Codec,
        recent: int,
        published: Callable[[Token], Weights],
    ) -> None:
        """
        Args:
            codec: of the peers' messages.
            recent: number of versions, including the current, from which a peer's weights may be a difference.
            published: the weights of a version that the broker holds; raises LostClaim: they are gone; CodecError.
        """
        self._session, self._layout, self._codec = session, layout, codec
        self._recent, self._published = recent, published
        self._references: dict[str, Vector] = {}
        """Token to the parameters of the recent versions, oldest first."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def newest(self, base: RoundState, parts: Mapping[int, Received], parameters: Vector) -> Newest:
        """The newest weights of each peer that is there or has a unit among `parts`.

        A peer whose reference is not known is left out until it publishes again: its weights are from before the
        version that precedes `base`, and this reducer has taken over since.

        Args:
            parameters: (d,) of the version `base`.
        """
        self._remember(base, parameters)
        last = {part.worker: part for part in sorted(parts.values(), key=lambda part: part.at)}
        known = {part.micro_batch: part for part in last.values() if part.base in self._references}
        earlier = {part.base for part in known.values()} - {str(base.token)}
        offsets = {token: parameters - self._references[token] for token in earlier}
        moved = {unit: offsets[part.base] for unit, part in known.items() if part.base in offsets}
        present = {part.worker for part in known.values()}
        missing = {worker for worker in (*self._session.peers(), *last) if worker not in present}
        absent = self._absent(sorted(missing), parameters)
        if absent.count < len(missing):
            about: dict[str, Any] = {"version": base.version, "peers": len(missing) - absent.count}
            self._remarks.tell(log.info, "weights left out of a version", job=self._session.job_id, **about)
        return Newest(known, moved, absent)

    def _remember(self, base: RoundState, parameters: Vector) -> None:
        """Keep the parameters of `base`, and of the version before: the broker has those for one that took over."""
        before = base.base if self._recent > 1 else None
        if before and str(before) not in self._references:
            with contextlib.suppress(LostClaim, CodecError):
                self._references[str(before)] = self._published(before).parameters
        self._references[str(base.token)] = parameters.copy()  # the step overwrites them
        for outdated in [*self._references][: -self._recent]:
            del self._references[outdated]

    def _absent(self, workers: Sequence[str], parameters: Vector) -> Absent:
        """The mean of these peers' published weights: of those that can be read, and are valid."""
        middle, buffers, count, squares = np.zeros_like(parameters), np.zeros(self._layout.buffers, np.float32), 0, 0.0
        room = np.empty(largest_update(self._layout) if workers else 0, np.uint8).data
        for worker in workers:
            if (found := self._read(worker, parameters, room)) is None:
                continue
            count += 1
            apart = np.subtract(found[0], middle, out=found[0])
            squares += square(apart) * (count - 1) / count
            apart /= np.float32(count)
            middle += apart
            buffers += (found[1] - buffers) / np.float32(count)
        return Absent(middle, buffers, count, squares)

    def _read(self, worker: str, parameters: Vector, room: memoryview) -> tuple[Vector, Vector] | None:
        """The parameters (d,) minus a peer's, and its buffers (b,); `room`: to receive its message."""
        entry, message = self._session.newest_of(worker, update_parts(self._layout), room)
        published = PublishedNotice.parse(entry) if entry else None
        reference = self._references.get(published.token) if published else None
        if message is None or reference is None:
            return None
        try:
            difference, buffers = decode_update(self._codec, message, self._layout, np.empty_like(parameters))
        except CodecError:
            return None  # nobody has judged it: it does not count yet
        difference += parameters
        difference -= reference
        valid = np.isfinite(difference).all() and np.isfinite(buffers).all()
        return (difference, buffers) if valid else None
