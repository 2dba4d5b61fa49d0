"""From one version to the next: the arithmetic that a reducer and a replay share. Knows no broker and no disk."""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from computeshare.codecs.messages import add_delta, decode_weights, encode_weights, in_parts
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.averages import Mean, square
from computeshare.strategies.base import Contributions
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.optimizers import Ready, ServerOptimizer
from computeshare.types import Blob, Counters, Vector

Buckets = Callable[[int], Iterable[Vector]]
"""Gives the bucket with this number of each update, one after the other; each holds until the next is asked for."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version: its full-precision parameters (d,) and the weights as workers hold them."""

    master: Vector
    weights: Weights


class Steps:
    """One job's steps; the optimizer's state is that of the version before the next step."""

    def __init__(self, spec: JobSpec, layout: Layout) -> None:
        factor = spec.micro_batches_per_round if spec.lr_scaling == "linear" else 1
        self.optimizer = ServerOptimizer(layout, spec.optimizer, factor)
        self._spec, self._down, self._layout = spec, CODECS[spec.codecs.down], layout
        self._gradient = np.empty(layout.parameters if len(layout.buckets) > 1 else 0, np.float32)

    def load(self, weights: Weights, state: Blob) -> Held:
        """Go on from a version's weights and the state that `dump` gave beside them, its parts joined.

        Nothing is copied: where `state` is writable, the next step writes over it. Without a state (that of a fork
        whose optimizer starts afresh, or of version 0) the optimizer stays as it is.
        Raises: ArtifactError, or struct.error: the state is damaged.
        """
        if not len(state):
            return Held(weights.parameters, weights)
        (length,) = struct.unpack_from("<Q", state)
        self.optimizer.load(memoryview(state)[8 + length :])
        master = np.frombuffer(state, np.float32, length // 4, 8) if length else weights.parameters
        return Held(master, weights)

    def dump(self, master: Vector) -> list[Blob]:
        """The optimizer's state, and the full-precision parameters where what is published has lost some, in parts that
        hold until the next step.
        """
        kept = b"" if self._down.exact else master.data.cast("B")
        return in_parts([struct.pack("<Q", len(kept)), kept, *self.optimizer.dump()])

    def combine(self, read: Buckets, samples: Sequence[int], staleness: Sequence[int] = ()) -> Vector:
        """The gradient (d,) of a round, bucket by bucket, so that no whole update is ever held.

        That of a model with several buckets holds until the next.

        Args:
            read: gives a bucket of each update, in the order of units.
        """
        strategy, buckets, norms = self._spec.strategy, self._layout.buckets, []
        if strategy.needs_norms and len(buckets) > 1:
            squares = np.array([[square(values) for values in read(index)] for index in range(len(buckets))])
            norms = [math.sqrt(sum(each)) for each in squares.T.tolist()]
        about = Contributions(samples, staleness, self._spec.workers.min, norms)
        if len(buckets) == 1:
            return strategy.gradient(read(0), about)
        for index, where in enumerate(buckets):
            out = self._gradient[where]
            values = strategy.gradient(read(index), about, out)
            if values is not out:
                out[...] = values
        return self._gradient

    def others(self, buffers: Vector, before: Weights) -> tuple[Vector, Counters]:
        """The buffers and counters of the version after `before`, from the mean of a round's buffers (b,)."""
        return buffers if self._layout.buffers else before.buffers, self._layout.counted(before.counters)

    def move(self, held: Held, gradient: Vector, ready: Ready = lambda values: None) -> Vector:
        """The full-precision parameters after those of `held`, in whose place they are written where nothing else needs
        those: `held` is good for `publish` alone then. `ready` is as for `ServerOptimizer.step`.
        """
        shared = self.chained and np.may_share_memory(held.master, held.weights.parameters)
        return self.optimizer.step(held.master, gradient, not shared, ready)

    @property
    def is_exact(self) -> bool:
        """Whether workers get the full-precision parameters as they are."""
        return self._down.exact

    @property
    def chained(self) -> bool:
        """Whether versions are published as their difference from the one before."""
        return self._down.differences

    def publish(self, full: Weights, before: Weights, version: int) -> tuple[Iterable[Blob], Held]:
        """A version's weights as they travel, to be read once, and what everyone holds who has read them.

        What a difference has lost is in the next one, which is that of the full-precision parameters from what
        everyone holds.

        Args:
            full: what `move` and `others` gave.
            before: the weights of the version before; nothing is read of them unless versions are published as
                differences.
        """
        if not self.chained:
            return self._whole(full)
        seed = version * len(self._layout.buckets)
        parts = [*encode_weights(self._down, full, self._layout, seed, before.parameters)]
        return parts, Held(full.parameters, add_delta(self._down, parts, self._layout, before))

    def blob(self, master: Vector, weights: Weights) -> tuple[list[Blob], Held]:
        """A version's whole weights as they travel, and what everyone holds who has read them.

        Where versions are published as differences, these are the weights as they are, exact; else the full-precision
        parameters with the others' buffers and counters.
        """
        if self.chained:
            return [*encode_weights(EXACT, weights, self._layout)], Held(master, weights)
        parts, held = self._whole(Weights(master, weights.buffers, weights.counters))
        return [*parts], held

    def _whole(self, full: Weights) -> tuple[Iterable[Blob], Held]:
        """As `publish`, of weights that are not published as a difference."""
        if self._down.exact:
            return encode_weights(self._down, full, self._layout), Held(full.parameters, full)
        parts = [*encode_weights(self._down, full, self._layout)]
        return parts, Held(full.parameters, decode_weights(self._down, parts, self._layout))

    def step(
        self,
        version: int,
        base: Held,
        parts: Sequence[tuple[Vector, Vector]],
        samples: Sequence[int],
        staleness: Sequence[int] = (),
    ) -> Held:
        """The version with this number, which comes after `base`.

        Args:
            parts: the version's decoded updates (d,), each with its buffers (b,), in the order of units.
            samples: how many samples each stands for.
            staleness: how many versions before `base` each was computed on; none: all on `base`.
        """
        updates, moved = zip(*parts, strict=True)
        buffers = Mean(sum(samples))
        for buffer, count in zip(moved, samples, strict=True):
            buffers.add(buffer, count)

        def read(index: int) -> Iterator[Vector]:
            return (update[self._layout.buckets[index]] for update in updates)

        master = self.optimizer.step(base.master, self.combine(read, samples, staleness))
        return self.publish(Weights(master, *self.others(buffers.value, base.weights)), base.weights, version)[1]
