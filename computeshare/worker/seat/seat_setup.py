"""A seat's set-up before it joins: opens the data set, builds the model, checks memory, tests the device."""

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from computeshare.errors import Unfit
from computeshare.jobspec.memory_estimate import does_not_fit, seat_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.processes import spare_the_collector
from computeshare.types import Precision, Vector

if TYPE_CHECKING:
    import torch

    from computeshare.tasks.base import TaskInstance
    from computeshare.worker.seat.link_benchmark import Compute

log = structlog.get_logger()


class SeatMemory:
    """Checks the memory that a seat needs and uses on its device against the limit."""

    def __init__(self, spec: JobSpec, device: "torch.device", allowed: int) -> None:
        """`allowed`: limit in bytes set by the worker's owner; 0: all of the device's memory."""
        from computeshare.training import memory

        self._spec, self._device, self._allowed = spec, device, allowed
        self._room = allowed or memory.room_bytes(device)
        self.needed_bytes = 0
        """Estimated bytes; measured bytes if the seat exceeded the limit."""
        self.saved_bytes: dict[Precision, int] = {}
        """By precision, as for `seat_bytes`."""

    def peak_bytes(self) -> int:
        """Peak memory use of this process on its device."""
        from computeshare.training import memory

        return memory.peak_bytes(self._device)

    def fits(self, precision: Precision) -> bool:
        """Whether the seat's need in a precision is within the limit, by estimate."""
        with contextlib.suppress(Unfit):
            self.check(precision)
            return True
        return False

    def check(self, precision: Precision = "float32") -> None:
        """Estimate the memory that the seat needs in a precision. Raises Unfit: it exceeds the limit."""
        from computeshare.training import memory

        saved = self.saved_bytes.get(precision, 0)
        self.needed_bytes = seat_bytes(self._spec, self._device.type, saved, memory.resident_bytes())
        if why := does_not_fit(self.needed_bytes, self._room, measured=False, by_flag=bool(self._allowed)):
            raise Unfit(why)

    def check_taken(self) -> None:
        """Raise Unfit if the seat's peak use exceeds the owner's limit."""
        if not self._allowed:
            return
        taken = self.peak_bytes()
        if why := does_not_fit(taken, self._allowed, measured=True, by_flag=True):
            self.needed_bytes = taken
            raise Unfit(why)


def set_up(
    job_id: str, spec: JobSpec, device: "torch.device", memory: SeatMemory, data_dir: Path, home: Path
) -> "TaskInstance":
    """Build the job's model and open its training split, and test the device with them.

    Args:
        home: folder with the results of passed self-tests.
    Raises: Unfit: the job does not fit, or the device computes wrongly; DatasetError; SpecError.
    """
    import torch

    from computeshare.tasks.registry import task_of

    started = time.perf_counter()
    instance = task_of(spec).instance(spec.seed, "train", data_dir)
    memory.check()
    _test(job_id, spec, instance, device, memory, home)
    spare_the_collector()
    seconds, threads = round(time.perf_counter() - started, 1), torch.get_num_threads()
    log.info("loaded", job=job_id, seconds=seconds, device=str(device), threads=threads)
    return instance


def _test(
    job_id: str, spec: JobSpec, instance: "TaskInstance", device: "torch.device", memory: SeatMemory, home: Path
) -> None:
    """Compare the device's gradient of this model with the CPU's. Raises Unfit: they differ, or it does not fit."""
    from computeshare.training import selftest

    trial = selftest.check(instance, device, home)
    if trial.trouble:
        raise Unfit(f"{trial.trouble}. Run computeshare doctor --selftest there; a restarted worker is tested anew")
    memory.saved_bytes["float32"] = trial.saved_bytes
    if spec.precision != "float32":
        memory.saved_bytes["bfloat16"] = selftest.saved_bytes_in_bfloat16(instance)
    if spec.precision != "auto":
        memory.check(spec.precision)
    elif not memory.fits("float32"):
        memory.check("bfloat16")
    error, seconds = float(f"{trial.error:.1g}"), round(trial.seconds, 2)
    log.info("self-test passed", job=job_id, error=error, seconds=seconds)


def trial_precisions(spec: JobSpec, memory: SeatMemory) -> list[Precision]:
    """The precisions to measure: the job's own or, where it is open, each that fits this machine's memory."""
    if spec.precision != "auto":
        return [spec.precision]
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    return [one for one in precisions if memory.fits(one)] or ["bfloat16"]


def trial_compute(spec: JobSpec, instance: "TaskInstance", device: "torch.device", precision: Precision) -> "Compute":
    """Micro-batches computed in a precision, with a copy of the instance's module, to be timed."""
    from computeshare.tasks.modules import weights_of
    from computeshare.training.work_units import replica_of

    copied = replace(instance, module=copy.deepcopy(instance.module))
    replica = replica_of(spec.model_copy(update={"precision": precision}), copied, device)
    replica.load(weights_of(instance.module, instance.layout))

    def compute(micro_batches: Sequence[int]) -> tuple[Vector, Vector]:
        update = replica.walk(micro_batches)
        return update.vector, update.buffers

    return compute
