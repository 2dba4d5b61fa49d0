"""The devices of one worker, as one: the same bits as a single device, because each unit is computed whole on one."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from computeshare.errors import Interrupted
from computeshare.jobspec.spec import JobSpec
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.devices import words_of
from computeshare.training.work_units import (
    AnyReplica,
    Compilation,
    Computation,
    Compute,
    InnerState,
    MemoryMeter,
    SelfTestResult,
)
from computeshare.types import Kind, Precision, Vector

log = structlog.get_logger()
Work = Callable[[AnyReplica, int], None]
"""Computes a unit with a device's replica, and takes its update."""


class Member(Protocol):
    """A job's computation on one of the worker's devices, as `Computation`."""

    @property
    def device(self) -> str: ...
    @property
    def memory(self) -> MemoryMeter: ...
    def test(self) -> SelfTestResult: ...
    def replica(self, spec: JobSpec) -> AnyReplica: ...
    def close(self) -> None: ...


class GroupMemory:
    """The memory of a worker's devices; a `MemoryMeter`. Each GPU has memory of its own, of which the fullest counts;
    devices that are CPUs share the machine's.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._meters = [one.memory for one in members]

    @property
    def device_type(self) -> str:
        return self._meters[0].device_type

    @property
    def sharers(self) -> int:
        """The number of devices that share one memory."""
        return len(self._meters) if self.device_type == "cpu" else 1

    def resident_bytes(self) -> int:
        return max(one.resident_bytes() for one in self._meters)

    def peak_bytes(self) -> int:
        return max(one.peak_bytes() for one in self._meters)

    def room_bytes(self) -> int:
        return min(one.room_bytes() for one in self._meters) // self.sharers


class GroupComputation:
    """A job's computation on each of a worker's devices, which are of one kind; a `Computation`.

    Args:
        names: the devices, such as `cuda:1`.
    """

    def __init__(self, first: Computation, others: Sequence[Member], names: Sequence[str]) -> None:
        self._members: list[Member] = [first, *others]
        self._first, self._names = first, names
        self.memory = GroupMemory(self._members)

    @property
    def layout(self) -> Layout:
        return self._first.layout

    @property
    def identity(self) -> Mapping[str, Any]:
        if len(self._members) == 1:
            return self._first.identity
        return {**self._first.identity, "devices": [one.device for one in self._members]}

    @property
    def frozen(self) -> str:
        return self._first.frozen

    @property
    def built(self) -> Weights | None:
        return self._first.built

    @property
    def device(self) -> str:
        return words_of([one.device for one in self._members])

    @property
    def kind(self) -> Kind:
        return self._first.kind

    def test(self) -> SelfTestResult:
        """Test each device; the result of the first that fails, else of the one farthest from the CPU."""
        trials = [one.test() for one in self._members]
        return max(trials, key=lambda trial: (bool(trial.trouble), trial.error))

    def saved_bytes_in_bfloat16(self) -> int:
        return self._first.saved_bytes_in_bfloat16()

    def trial(self, spec: JobSpec, precision: Precision) -> Compute:
        return self._first.trial(spec, precision)

    def replica(self, spec: JobSpec) -> AnyReplica:
        return self._first.replica(spec)

    def replicas(self, spec: JobSpec) -> list[AnyReplica]:
        """Each device's replica, as `Computation.replica`."""
        return [one.replica(spec) for one in self._members]

    @property
    def names(self) -> list[str]:
        """The devices: `cuda:0`, `cuda:1`; several CPUs get numbers."""
        if len(set(self._names)) == len(self._names):
            return list(self._names)
        return [f"{name}:{number}" for number, name in enumerate(self._names)]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for one in self._members:
                closing.callback(one.close)


class DeviceGroup:
    """The replicas of a worker's devices. The first computes in the calling thread, each other in a thread that waits
    for its process.

    A device that fails takes no more units; what it was computing goes to the others, and so do its later units.
    """

    def __init__(self, replicas: Sequence[AnyReplica], names: Sequence[str] = ("device",)) -> None:
        self._replicas, self._lock = list(replicas), threading.Lock()
        self.names = list(names)
        self.units = [0] * len(self._replicas)
        """The number of units that each device has computed."""
        self.stopped: dict[int, str] = {}
        """Why a device, by its place, computes no more."""

    @property
    def working(self) -> list[int]:
        """The places of the devices that have not failed."""
        return [place for place in range(len(self._replicas)) if place not in self.stopped]

    @property
    def room(self) -> Vector | None:
        """As `Replica.room`: the first device's."""
        return self._replicas[0].room if 0 not in self.stopped else None

    @property
    def kept(self) -> InnerState | None:
        """The inner state of the first device that works; the other devices' states end with the seat."""
        return self._replicas[self.working[0]].kept

    @property
    def compilation(self) -> Compilation:
        return self._replicas[0].compilation

    def load(self, weights: Weights) -> None:
        """Start the following units from `weights`, which are copied, on each device. Raises ShapeError."""
        for place in self.working:
            self._guarded(place, lambda replica: replica.load(weights))

    def prefetch(self, units: Iterable[int]) -> None:
        """As `Replica.prefetch`: each device its share."""
        units = tuple(units)
        for place in self.working:
            mine = [unit for unit in units if self._is_of(unit, place)]
            self._guarded(place, lambda replica, mine=mine: replica.prefetch(mine))  # type: ignore[misc]

    def compute(self, units: Sequence[int], work: Work) -> None:
        """Compute units, each on one device. Raises Interrupted; the last device's error, if all have failed."""
        left, errors, interrupted = list(units), [], threading.Event()

        def next_unit(place: int) -> int | None:
            with self._lock:
                if not left or interrupted.is_set():
                    return None
                unit = next((one for one in left if self._is_of(one, place)), left[0])
                left.remove(unit)
                return unit

        def run(place: int) -> None:
            while (unit := next_unit(place)) is not None:
                try:
                    work(self._replicas[place], unit)
                    self.units[place] += 1
                except Interrupted:
                    interrupted.set()
                except Exception as error:
                    with self._lock:
                        left.append(unit)
                    errors.append(error)
                    self._stop(place, error)
                    return

        while left and not interrupted.is_set():
            places = self.working[: len(left)]
            if not places:
                raise errors[-1]
            here = 0 if 0 in places else None
            threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places if place != here]
            for thread in threads:
                thread.start()
            try:
                if here is not None:
                    run(here)
            finally:
                for thread in threads:
                    thread.join()
        if interrupted.is_set():
            raise Interrupted("the work was called off")

    def _is_of(self, unit: int, place: int) -> bool:
        """Whether a unit's batch is assembled ahead by the device at this place."""
        return unit % len(self._replicas) == place

    def _guarded(self, place: int, do: Callable[[AnyReplica], None]) -> None:
        """Stop a device that fails, unless it is the last one, whose error is raised."""
        try:
            do(self._replicas[place])
        except Exception as error:
            if len(self.working) == 1:
                raise
            self._stop(place, error)

    def _stop(self, place: int, error: Exception) -> None:
        self.stopped[place] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        if len(self._replicas) > 1:
            log.error("device stopped", device=self.names[place], error=self.stopped[place])
