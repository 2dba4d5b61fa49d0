"""The layout of a model's `state_dict` in flat vectors. Pure NumPy, without torch.

Weights are three vectors: the parameters (float32), the floating-point buffers (float32; BatchNorm's running
statistics) and the counters (int64; BatchNorm's `num_batches_tracked`), each in `state_dict` order.
"""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from computeshare.errors import ShapeError
from computeshare.types import Counters, Vector

Kind = Literal["parameter", "buffer", "counter"]
BUCKET, LEAST_BUCKET, PREFERRED_BUCKETS = 1 << 20, 1 << 17, 4
"""Most values per bucket (4 MB of float32), and fewest of a model that has several: its parameters travel in four
buckets within these limits, so that parts of a version go down while others come up. Each costs a round trip more.
"""


def bucket_values(parameters: int) -> int:
    """The number of values in each bucket but the last of a model with so many parameters."""
    return min(BUCKET, max(LEAST_BUCKET, math.ceil(parameters / PREFERRED_BUCKETS)))


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's state: parameters (d,) and buffers (b,) float32, counters (c,) int64."""

    parameters: Vector
    buffers: Vector
    counters: Counters

    def copy(self) -> "Weights":
        return Weights(self.parameters.copy(), self.buffers.copy(), self.counters.copy())

    def vector(self, kind: Kind) -> npt.NDArray[np.generic]:
        vectors: dict[Kind, npt.NDArray[Any]] = {
            "parameter": self.parameters,
            "buffer": self.buffers,
            "counter": self.counters,
        }
        return vectors[kind]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the `state_dict`, and its range in the vector of its kind."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int
    stop: int

    @property
    def columns(self) -> int:
        """The number of values in a row if the tensor is taken as a matrix (out, rest); 1 for a vector."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Piece:
    """The values `start` to `stop` of one tensor, taken as a matrix whose rows have `columns` values each."""

    columns: int
    """1 for a vector, else the number of values per output (the first dimension)."""
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The entries of a `state_dict`, in its order."""

    tensors: tuple[Tensor, ...]
    cuts: tuple[int, ...] = ()
    """Places in the parameter vector, ascending, where a bucket begins: a bucket belongs to one of several stages."""

    @classmethod
    def build(cls, entries: Iterator[tuple[str, tuple[int, ...], Kind]]) -> "Layout":
        """Lay out `(name, shape, kind)` entries one after another."""
        ends: dict[Kind, int] = {"parameter": 0, "buffer": 0, "counter": 0}
        tensors = []
        for name, shape, kind in entries:
            start, ends[kind] = ends[kind], ends[kind] + int(np.prod(shape, dtype=np.int64))
            tensors.append(Tensor(name, tuple(shape), kind, start, ends[kind]))
        return cls(tuple(tensors))

    def _size(self, kind: Kind) -> int:
        return max((t.stop for t in self.tensors if t.kind == kind), default=0)

    @cached_property
    def parameters(self) -> int:
        """Length d of the parameter vector."""
        return self._size("parameter")

    @cached_property
    def buckets(self) -> tuple[slice, ...]:
        """The slices of the parameter vector that travel separately; at least one."""
        whole = max(1, self.parameters)
        borders = [0, *self.cuts, whole]
        step = bucket_values(whole)
        runs = [range(start, stop, step) for start, stop in itertools.pairwise(borders)]
        starts = [start for run in runs for start in run]
        return tuple(slice(start, min(stop, self.parameters)) for start, stop in itertools.pairwise([*starts, whole]))

    @cached_property
    def bucket_sizes(self) -> tuple[int, ...]:
        """The number of values in each bucket."""
        return tuple(bucket.stop - bucket.start for bucket in self.buckets)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """For each bucket, the pieces of tensors that make it up, in order."""
        return tuple(
            tuple(
                Piece(t.columns, max(t.start, bucket.start) - t.start, min(t.stop, bucket.stop) - t.start)
                for t in self.tensors
                if t.kind == "parameter" and max(t.start, bucket.start) < min(t.stop, bucket.stop)
            )
            for bucket in self.buckets
        )

    @cached_property
    def buffers(self) -> int:
        """Length b of the buffer vector."""
        return self._size("buffer")

    @cached_property
    def counters(self) -> int:
        """Length c of the counter vector."""
        return self._size("counter")

    def check(self, weights: Weights) -> None:
        """Raise ShapeError unless `weights` fit this layout."""
        found = (weights.parameters.shape, weights.buffers.shape, weights.counters.shape)
        expected = ((self.parameters,), (self.buffers,), (self.counters,))
        if found != expected:
            raise ShapeError(f"weights of shapes {found} do not fit a layout of {expected}")

    def views(self, weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
        """The `state_dict` as NumPy views into the three vectors."""
        self.check(weights)
        return {t.name: weights.vector(t.kind)[t.start : t.stop].reshape(t.shape) for t in self.tensors}

    def gather(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> Weights:
        """Copy a `state_dict` of arrays into weights. Raises ShapeError: its names or shapes are not the layout's."""
        weights = Weights(
            np.empty(self.parameters, np.float32),
            np.empty(self.buffers, np.float32),
            np.empty(self.counters, np.int64),
        )
        views = self.views(weights)
        if {n: v.shape for n, v in views.items()} != {n: t.shape for n, t in tensors.items()}:
            raise ShapeError("the checkpoint's tensors are not those of this model")
        for name, view in views.items():
            view[...] = tensors[name]
        return weights

    def counted(self, counters: Counters) -> Counters:
        """The counters (c,) one round later: `num_batches_tracked` plus one, other integer buffers unchanged."""
        following = counters.copy()
        for t in self.tensors:
            if t.kind == "counter" and t.name.endswith("num_batches_tracked"):
                following[t.start : t.stop] += 1
        return following

    def digest(self, weights: Weights) -> str:
        """sha256, in hex, over all tensors' little-endian bytes in `state_dict` order."""
        self.check(weights)
        digest = Digest(self, weights.buffers, weights.counters)
        digest.add(weights.parameters)
        return digest.hexdigest()

    @cached_property
    def runs(self) -> list[tuple[Kind, int, int]]:
        """(kind, start, stop) of the tensors, neighbours of one kind merged so that a digest takes few calls."""
        runs: list[tuple[Kind, int, int]] = []
        for t in self.tensors:
            if runs and runs[-1][0] == t.kind and runs[-1][2] == t.start:
                runs[-1] = (t.kind, runs[-1][1], t.stop)
            else:
                runs.append((t.kind, t.start, t.stop))
        return runs


class Digest:
    """The digest of weights whose parameters arrive piece by piece, while later pieces are still being computed.

    Args:
        buffers: (b,). counters: (c,).
    """

    def __init__(self, layout: Layout, buffers: Vector, counters: Counters) -> None:
        self._left = deque(layout.runs)
        self._others: dict[Kind, npt.NDArray[Any]] = {"buffer": buffers, "counter": counters}
        self._sha = hashlib.sha256()
        self._count, self._expected = 0, layout.parameters

    def add(self, parameters: Vector) -> None:
        """Add the next parameters, in order."""
        begun, self._count = self._count, self._count + len(parameters)
        while self._left:
            kind, start, stop = self._left[0]
            if kind != "parameter":
                self._update(self._others[kind][start:stop])
            else:
                self._update(parameters[max(start - begun, 0) : stop - begun])
                if stop > self._count:
                    return
            self._left.popleft()

    def hexdigest(self) -> str:
        """The sha256 in hex. Raises ShapeError: too few or too many parameters were added."""
        self.add(np.zeros(0, np.float32))  # what follows the last parameter
        if self._count != self._expected:
            raise ShapeError(f"weights of {self._count} parameters do not fit a layout of {self._expected}")
        return self._sha.hexdigest()

    def _update(self, part: npt.NDArray[Any]) -> None:
        self._sha.update(part.astype(part.dtype.newbyteorder("<"), copy=False).data)
