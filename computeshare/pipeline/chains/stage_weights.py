"""A run of stages' part of each version: which buckets it reads and sends, and how its tensors lie in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from redis import Redis

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import decode_some, weights_parts
from computeshare.pipeline.partition import StagePlan
from computeshare.protocol.channel import Channel
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.tensors.layout import Layout, Tensor, Weights
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Vector

AT_ONCE = 4
"""Buckets that are read and decoded together: a stage may be most of what fits into memory."""
TRAILING = 3
"""Parts of a version's weights after the buckets: buffers, counters, digests."""


@dataclass(frozen=True)
class StageParts:
    """The part of a model that a run of stages, `held`, has; `layout` has the plan's cuts."""

    layout: Layout
    plan: StagePlan
    held: range

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The buckets that the stages own."""
        return tuple(b for b, stage in enumerate(self.plan.stage_of_buckets(self.layout)) if stage in self.held)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The entries that the stages use, borrowed ones too."""
        facts = [self.plan.stages[stage] for stage in self.held]
        used = {name for one in facts for name in (*one.names, *one.borrowed)}
        return tuple(one for one in self.layout.tensors if one.name in used)

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The buckets with the parameters that the stages use."""
        used = [one for one in self.tensors if one.kind == "parameter"]
        return tuple(
            bucket
            for bucket, where in enumerate(self.layout.buckets)
            if any(one.start < where.stop and where.start < one.stop for one in used)
        )

    @cached_property
    def buffers(self) -> dict[str, slice]:
        """Where the buffers that the stages own lie in the buffer vector (b,), in the layout's order."""
        own = {name for stage in self.held for name in self.plan.stages[stage].names}
        kept = (one for one in self.layout.tensors if one.kind == "buffer" and one.name in own)
        return {one.name: slice(one.start, one.stop) for one in kept}

    @property
    def buffer_count(self) -> int:
        """The number of values in these buffers."""
        return sum(where.stop - where.start for where in self.buffers.values())

    def joined_buffers(self, by_stage: Sequence[Mapping[str, Vector]]) -> Vector:
        """These buffers, joined in order, from those of each stage by name."""
        found = {name: values for one in by_stage for name, values in one.items()}
        return _joined([found[name].reshape(-1) for name in self.buffers])

    def put_buffers(self, vector: Vector, joined: Vector) -> None:
        """Write these buffers, joined in order, into the buffer vector (b,)."""
        start = 0
        for where in self.buffers.values():
            size = where.stop - where.start
            vector[where] = joined[start : start + size]
            start += size

    def views(self, weights: Weights) -> dict[str, npt.NDArray[Any]]:
        """The stages' tensors by name; the parameters in `weights` are those of the buckets `read`, joined."""
        starts, end = {}, 0
        for bucket in self.read:
            starts[bucket], end = end, end + self.layout.bucket_sizes[bucket]
        found: dict[str, npt.NDArray[Any]] = {}
        for one in self.tensors:
            start, vector = one.start, weights.vector(one.kind)
            if one.kind == "parameter":  # a tensor's buckets are neighbours: none of them belongs to another stage
                bucket = next(b for b in self.read if self.layout.buckets[b].stop > one.start)
                start = starts[bucket] + one.start - self.layout.buckets[bucket].start
            found[one.name] = vector[start : start + one.stop - one.start].reshape(one.shape)
        return found


class StageVersions:
    """Reads the part of each version that a run of stages uses."""

    news: None = None

    def __init__(
        self,
        redis: Redis,
        session: WorkerSession,
        codec: Codec,
        parts: StageParts,
        wires: Wires,
        room: Vector | None = None,
    ) -> None:
        """`room`: memory for the parameters in the buckets that `parts` reads, joined; None: they get their own."""
        self._channel, self._session, self._codec, self._parts = Channel(redis, wires), session, codec, parts
        size = sum(parts.layout.bucket_sizes[bucket] for bucket in parts.read)
        self._vector = np.empty(size, np.float32) if room is None else room
        self.bytes, self.token = 0, ""
        """Bytes received; the token of the version read last."""
        self._weights: Weights | None = None

    def pull(self, token: str) -> tuple[Weights | None, Grant]:
        """As `WeightsReceiver.pull`."""
        weights = self.read(token)
        return weights, self._session.lease(token)

    def read(self, token: str) -> Weights | None:
        """The stages' part of a version, its parameters joined; None if the version is gone. Valid until the next one.

        The one that was read last is not read again. Raises CodecError: the part is not what the reducer published.
        """
        if token == self.token:
            return self._weights
        self.forget()
        key, after = self._session.keys.weights(token), weights_parts(self._parts.layout) - TRAILING
        last, start = self._fetched(key, range(after, after + TRAILING)), 0
        buffers, counters = np.zeros(0, np.float32), np.zeros(0, np.int64)
        for first in range(0, max(1, len(self._parts.read)), AT_ONCE):
            some = self._parts.read[first : first + AT_ONCE]
            frames = [*self._fetched(key, some), *last]
            if None in frames:
                return None
            values, buffers, counters = decode_some(self._codec, frames, some, self._parts.layout)
            for bucket in some:
                stop = start + len(values[bucket])
                self._vector[start:stop], start = values[bucket], stop
        self.token, self._weights = token, Weights(self._vector, buffers, counters)
        return self._weights

    def _fetched(self, key: str, parts: Sequence[int]) -> Sequence[Blob | None]:
        frames: Sequence[Blob | None] = self._channel.exchange([["HMGET", key, *parts]], large=True)[0] if parts else []
        self.bytes += sum(len(one) for one in frames if one is not None)
        return frames

    def look_out(self, token: str) -> None:
        """Nothing: versions of stages are not drafted."""

    def is_right(self) -> bool:
        """True: each part was compared with its digest when it was read."""
        return True

    def forget(self) -> None:
        """Read the version that was read last again."""
        self.token, self._weights = "", None


def _joined(vectors: Sequence[Vector]) -> Vector:
    return np.concatenate(vectors) if vectors else np.zeros(0, np.float32)
