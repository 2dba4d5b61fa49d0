"""The interface for computing a job's units on a machine's device, and its results. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from computeshare.jobspec.spec import JobSpec
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Blob, Kind, Precision, Vector

Take = Callable[[int, Vector], None]
"""Called with a bucket's number and its values, which may change after the call. A replica whose buffers (b,) are known
before its last buckets passes them, too, under the number after the last bucket's.
"""
Compute = Callable[[Sequence[int]], tuple[Vector, Vector]]
"""Computes some micro-batches; returns the update (d,) and the buffers (b,)."""


@dataclass(frozen=True, slots=True)
class Update:
    """A unit's update.

    `vector` (d,) is the gradient of `loss` (the mean over the unit's samples), or the pseudo-gradient of local steps;
    `buffers` (b,) are the floating-point buffers after the last forward pass. Both are float32 copies. `vector` is
    empty if its buckets were passed to `take`.
    """

    vector: Vector
    buffers: Vector
    loss: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """The compiler in use (empty: none) and, if compilation was asked for but failed, the reason."""

    compiler: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """The result of a device's self-test.

    `error` is the largest relative distance of a tensor's gradient; `saved_bytes` the bytes per sample that the forward
    pass saves for the backward pass; `trouble` a description of the fault, empty if the device passed.
    """

    error: float
    seconds: float
    saved_bytes: int
    trouble: str = ""


class InnerState(Protocol):
    """The inner optimizer's state, kept from unit to unit and handed over by workers that leave; see `LocalReplica`."""

    def steps(self, unit: int, part: slice, goes_on: Callable[[], bool]) -> Update:
        """Take a part of a unit's steps from the weights loaded last. Raises Interrupted."""

    def dump(self) -> Sequence[Blob] | None: ...
    def restore(self, state: Blob) -> None: ...


class AnyReplica(Protocol):
    """The model with which a machine takes part in a job: `load` a version's weights, then `compute` units."""

    @property
    def room(self) -> Vector | None:
        """As `Replica.room`."""

    @property
    def kept(self) -> InnerState | None:
        """The inner state, if the strategy keeps it."""

    @property
    def compilation(self) -> Compilation:
        """By what the module is compiled."""

    def load(self, weights: Weights) -> None: ...

    def prefetch(self, micro_batches: Iterable[int]) -> None: ...

    def compute(self, unit: int, goes_on: Callable[[], bool] = ..., take: Take | None = None) -> Update:
        """Compute the unit with this number. Raises Interrupted.

        Args:
            take: is given the buckets of the update as they become ready; the result need not have them then.
        """


class MemoryMeter(Protocol):
    """The memory of a device, and of the process that computes with it; see `training.memory`."""

    @property
    def device_type(self) -> str:
        """`cpu`, `mps` or `cuda`."""

    def resident_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def room_bytes(self) -> int: ...


class Computation(Protocol):
    """A job's model and training data on this machine's device, in this process or in another."""

    @property
    def layout(self) -> Layout: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """As `Task.identity`."""

    @property
    def frozen(self) -> str:
        """The digest of the parameters that need no gradient, as `modules.frozen_digest`."""

    @property
    def built(self) -> Weights | None:
        """The weights that the module was built with, in new memory; None: they are in another process."""

    @property
    def device(self) -> str:
        """The device in words, as `devices.describe`."""

    @property
    def kind(self) -> Kind:
        """The machine's kind, as `devices.kind`."""

    @property
    def memory(self) -> MemoryMeter: ...

    def test(self) -> SelfTestResult:
        """Test the device with the model, as `selftest.run`."""

    def saved_bytes_in_bfloat16(self) -> int:
        """The bytes per sample that the forward pass saves for the backward pass under bfloat16 autocast."""

    def trial(self, spec: JobSpec, precision: Precision) -> Compute:
        """Micro-batches computed in a precision, with a copy of the module, to be timed."""

    def replica(self, spec: JobSpec) -> AnyReplica:
        """The replica for the job's strategy; it takes over the module, so this is the last call but for `memory`."""

    def close(self) -> None:
        """Release what the computation holds."""


class Compiled(Protocol):
    """A replica that may be compiled."""

    @property
    def compilation(self) -> Compilation: ...


def kind_with(kind: Kind, replica: Compiled) -> Kind:
    """The kind of a machine as it computes with the replica: as `devices.kind`, and the compiler if one is used."""
    compiler = replica.compilation.compiler
    return kind | ({"compiler": compiler} if compiler else {})
