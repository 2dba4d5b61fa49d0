"""The server's step from one version to the next: combine, optimize, encode. No I/O; reducers and replays use it."""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from computeshare.codecs.messages import (
    add_delta,
    decode_weights,
    encode_rest,
    encode_weights,
    encode_weights_bucket,
    in_parts,
)
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.averages import Average, square
from computeshare.strategies.base import Contributions
from computeshare.tensors.layout import Digest, Layout, Weights
from computeshare.training.optimizers import Ready, ServerOptimizer, States
from computeshare.types import Blob, Counters, Vector

Buckets = Callable[[int], Iterable[Vector]]
"""Given a bucket's number, yields that bucket of each update in turn; a yielded vector is valid until the next."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """One version of the model on the server."""

    master: Vector
    """Full-precision parameters (d,)."""
    published: Weights
    """The weights as workers decode them; a lossy codec makes their parameters differ from `master`."""


class ServerStep:
    """One job's server step. Its optimizer's state and the moving average belong to the newest version loaded or
    computed.
    """

    def __init__(self, spec: JobSpec, layout: Layout) -> None:
        self.optimizer = ServerOptimizer(layout, spec.optimizer, spec.server_rules)
        self._spec, self._down, self._layout = spec, CODECS[spec.codecs.down], layout
        self._average: Vector | None = None
        self._gradient = np.empty(layout.parameters if len(layout.buckets) > 1 else 0, np.float32)

    def load(self, weights: Weights, state: Blob) -> ServerModel:
        """Restore a version from its published weights and the joined parts of its `dump`.

        Nothing is copied: if `state` is writable, the next step overwrites it. An empty state (version 0, or a fork
        with a fresh optimizer) leaves the optimizer as it is; a moving average then begins with these weights.
        Raises: ArtifactError, or struct.error: the state is damaged.
        """
        if not len(state):
            self._average = weights.parameters.copy() if self._spec.ema else None
            return ServerModel(weights.parameters, weights)
        (length,) = struct.unpack_from("<Q", state)
        start = 8 + length
        if self._spec.ema:
            average = np.frombuffer(state, np.float32, self._layout.parameters, start)
            self._average = np.require(average, requirements="W")  # a copy if the state is read-only
            start += average.nbytes
        self.optimizer.load(memoryview(state)[start:])
        master = np.frombuffer(state, np.float32, length // 4, 8) if length else weights.parameters
        return ServerModel(master, weights)

    def dump(self, master: Vector) -> list[Blob]:
        """The full-precision parameters if the codec down is lossy, the moving average if the job keeps one, and the
        optimizer's state, as parts that are valid until the next step.
        """
        kept = b"" if self._down.exact else master.data.cast("B")
        average = b"" if self._average is None else self._average.data.cast("B")
        return in_parts([struct.pack("<Q", len(kept)), kept, average, *self.optimizer.dump()])

    def averaged(self, published: Weights) -> Weights | None:
        """The moving average of the versions' full-precision parameters up to this version, which is `published`, with
        its buffers; valid until the next step. None: the job keeps none.
        """
        if self._average is None:
            return None
        return Weights(self._average, published.buffers, published.counters)

    def combine(self, read: Buckets, samples: Sequence[int], staleness: Sequence[int] = ()) -> Vector:
        """Combine a round's updates into the gradient (d,), bucket by bucket: no whole update is in memory.

        With several buckets, the returned vector is valid until the next call.

        Args:
            read: yields a bucket of each update, in the order of units.
            samples: number of samples in each update.
            staleness: each update's staleness in versions; empty: all are fresh.
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

    def draft(self, model: ServerModel, version: int, samples: Sequence[int]) -> "VersionDraft":
        """The version `version`, to be made of `model` bucket by bucket, in a job with drafts (`JobSpec.has_drafts`).

        Args:
            samples: number of samples in each update, in the order of units.
        """
        about = Contributions(samples, workers=self._spec.workers.min)
        return VersionDraft(self, self._spec, self._layout, model, version, about)

    def average(self, samples: Sequence[int]) -> Average:
        """An average for the buffers of updates with so many samples each."""
        return self._spec.strategy.average(samples, self._spec.workers.min)

    def mean_buffers(self, buffers: Iterable[Vector], samples: Sequence[int]) -> Vector:
        """The average (b,) of updates' buffers (b,), each of so many samples."""
        average = self.average(samples)
        for values, count in zip(buffers, samples, strict=True):
            average.add(values, count)
        return average.value

    def next_buffers(self, buffers: Vector, before: Weights) -> tuple[Vector, Counters]:
        """The buffers and counters of the version after `before`, given the mean (b,) of a round's buffers."""
        return buffers if self._layout.buffers else before.buffers, self._layout.counted(before.counters)

    def next_parameters(
        self, version: int, model: ServerModel, gradient: Vector, ready: Ready = lambda values: None
    ) -> Vector:
        """Take the optimizer's step: the full-precision parameters (d,) of `version`, the version after `model`.

        They overwrite `model.master`, and `gradient`, to save memory, unless `publish` needs the old values for a
        difference. Afterwards `model` may only be passed to `publish`.

        Args:
            ready: as in `ServerOptimizer.step`.
        """
        shared = self.chained and np.may_share_memory(model.master, model.published.parameters)
        return self.moved(self.optimizer.step(model.master, gradient, version - 1, not shared, ready))

    def moved(self, parameters: Vector) -> Vector:
        """Move the average towards a version's parameters (d,), as `torch.optim.swa_utils` does; returns them."""
        if self._average is not None:
            torch.from_numpy(self._average).lerp_(torch.from_numpy(parameters), 1 - self._spec.ema)
        return parameters

    @property
    def is_exact(self) -> bool:
        """Whether the codec down is lossless: workers get the full-precision parameters."""
        return self._down.exact

    @property
    def is_stateless(self) -> bool:
        """Whether a version is its weights alone: no optimizer state, no average, no higher precision."""
        optimizer = self._spec.optimizer
        return (
            self.is_exact and not self._spec.ema and optimizer.name == "SGD" and not optimizer.arguments.get("momentum")
        )

    @property
    def chained(self) -> bool:
        """Whether versions are published as differences from the version before."""
        return self._down.differences

    def publish(self, full: Weights, before: Weights, version: int) -> tuple[Iterable[Blob], ServerModel]:
        """Encode a version for the workers.

        A difference is taken between the full-precision parameters and the weights published before, so each
        difference also corrects the rounding errors of the earlier differences.

        Args:
            full: the version's full-precision weights, from `next_parameters` and `next_buffers`.
            before: the weights published for the version before; read only if versions are published as differences.
        Returns: the encoded parts, which can be iterated once, and the version as workers will decode it.
        """
        if not self.chained:
            return self._encode_whole(full)
        seed = version * len(self._layout.buckets)
        parts = [*encode_weights(self._down, full, self._layout, seed, before.parameters)]
        return parts, ServerModel(full.parameters, add_delta(self._down, parts, self._layout, before))

    def publish_whole(self, model: ServerModel) -> tuple[list[Blob], ServerModel]:
        """Encode a whole version, not a difference.

        Returns: the encoded parts, and the version as workers will decode it: exactly `model` if versions are
        published as differences; else its full-precision parameters after the codec down.
        """
        before = model.published
        if self.chained:
            return [*encode_weights(EXACT, before, self._layout)], model
        parts, decoded = self._encode_whole(Weights(model.master, before.buffers, before.counters))
        return [*parts], decoded

    def encode_published(self, weights: Weights) -> list[Blob]:
        """Encode weights that workers hold, as `Recovery.published` decodes them."""
        return [*encode_weights(EXACT if self.chained else self._down, weights, self._layout)]

    def _encode_whole(self, full: Weights) -> tuple[Iterable[Blob], ServerModel]:
        """As `publish`, without a difference."""
        if self._down.exact:
            return encode_weights(self._down, full, self._layout), ServerModel(full.parameters, full)
        parts = [*encode_weights(self._down, full, self._layout)]
        return parts, ServerModel(full.parameters, decode_weights(self._down, parts, self._layout))

    def step(
        self,
        version: int,
        base: ServerModel,
        parts: Sequence[tuple[Vector, Vector]],
        samples: Sequence[int],
        staleness: Sequence[int] = (),
    ) -> ServerModel:
        """Compute and publish version `version` from `base` in one call.

        Args:
            parts: the decoded updates (d,), each with its buffers (b,), in the order of units.
            samples: number of samples in each update.
            staleness: each update's staleness in versions; empty: all were computed on `base`.
        """
        updates, moved = zip(*parts, strict=True)
        buffers = self.mean_buffers(moved, samples)

        def read(index: int) -> Iterator[Vector]:
            return (update[self._layout.buckets[index]] for update in updates)

        master = self.moved(self.optimizer.step(base.master, self.combine(read, samples, staleness), version - 1))
        return self.publish(Weights(master, *self.next_buffers(buffers, base.published)), base.published, version)[1]


class VersionDraft:
    """The version after `model`, made bucket by bucket in any order, to the same bits as by `combine`,
    `next_parameters` and `publish`. Until `finish` it changes nothing else: it may be given up at any time.
    """

    digest: Digest
    """To which the buckets are to be added, in order; there is none before `settle`."""

    def __init__(
        self, step: ServerStep, spec: JobSpec, layout: Layout, model: ServerModel, version: int, about: Contributions
    ) -> None:
        """`about`: the updates that are combined."""
        self._step, self._layout, self._model, self._version, self._about = step, layout, model, version, about
        self._strategy, self._down = spec.strategy, CODECS[spec.codecs.down]
        self._master = np.empty_like(model.master)
        self._published = self._master if step.is_exact else np.empty_like(model.master)
        self._states: States = {}
        self._others: tuple[Vector, Counters] = (model.published.buffers, model.published.counters)

    def add(self, bucket: int, updates: Iterable[Vector]) -> Blob:
        """Make a bucket from this bucket of each update, in the order of units. Returns its frame for the workers.

        Raises: FloatingPointError: the step produced NaN or infinity.
        """
        where, before = self._layout.buckets[bucket], self._model.published.parameters
        values = self._master[where]
        gradient = self._strategy.gradient(updates, self._about)
        np.copyto(values, self._model.master[where])
        self._states |= self._step.optimizer.step_bucket(bucket, values, gradient, self._version - 1)
        if not np.isfinite(values).all():
            raise FloatingPointError
        published = None if self._step.is_exact else self._published[where]
        seed, old = (self._version * len(self._layout.buckets), before[where]) if self._step.chained else (0, None)
        return encode_weights_bucket(self._down, values, self._layout, bucket, seed, old, published)

    def settle(self, buffers: Iterable[Vector]) -> list[Blob]:
        """Make the buffers and counters from each update's buffers (b,), in the order of units. Returns their frames,
        which follow those of the buckets.
        """
        mean = self._step.mean_buffers(buffers, self._about.samples)
        self._others = self._step.next_buffers(mean, self._model.published)
        self.digest = Digest(self._layout, *self._others)
        return encode_rest(*self._others)

    def published(self, bucket: int) -> Vector:
        """A bucket's parameters as workers decode them."""
        return self._published[self._layout.buckets[bucket]]

    def finish(self) -> ServerModel:
        """Complete the version, all of whose buckets and buffers were made. The optimizer and the
        moving average now belong to it.
        """
        self._step.optimizer.adopt(self._states)
        self._step.moved(self._master)
        return ServerModel(self._master, Weights(self._published, *self._others))
