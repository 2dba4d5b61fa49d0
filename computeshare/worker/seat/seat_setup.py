"""A seat's set-up before it joins: opens the data set, builds the model, checks memory, tests the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from computeshare.errors import Unfit
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.memory_estimate import does_not_fit, seat_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.processes import spare_the_collector
from computeshare.tensors.layout import Layout

if TYPE_CHECKING:
    import torch

    from computeshare.training.work_units import AnyReplica

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

    def peak_bytes(self) -> int:
        """Peak memory use of this process on its device."""
        from computeshare.training import memory

        return memory.peak_bytes(self._device)

    def check(self, saved_bytes: int = 0) -> None:
        """Estimate the memory that the seat needs. Raises Unfit: it exceeds the limit.

        Args:
            saved_bytes: as for `seat_bytes`.
        """
        from computeshare.training import memory

        self.needed_bytes = seat_bytes(self._spec, self._device.type, saved_bytes, memory.resident_bytes())
        if why := does_not_fit(self.needed_bytes, self._room, measured=False, by_flag=bool(self._allowed)):
            raise Unfit(why)

    def check_taken(self) -> None:
        """Raise Unfit if the seat's peak use exceeds the owner's limit."""
        taken = self.peak_bytes()
        if self._allowed and (why := does_not_fit(taken, self._allowed, measured=True, by_flag=True)):
            self.needed_bytes = taken
            raise Unfit(why)


@dataclass(frozen=True, slots=True)
class SeatContext:
    """A job's model and data on this machine's device."""

    module: "torch.nn.Module"
    layout: Layout
    make_replica: "Callable[[JobSpec], AnyReplica]"


def set_up(
    job_id: str, spec: JobSpec, device: "torch.device", memory: SeatMemory, data_dir: Path, home: Path
) -> SeatContext:
    """Open the data set, build the model, and test the device with it.

    Args:
        home: folder with the results of passed self-tests.
    Raises: Unfit: the job does not fit, or the device computes wrongly; DatasetError; SpecError.
    """
    import torch

    from computeshare.tasks import modules
    from computeshare.tasks.images import datasets, models
    from computeshare.training.work_units import replica_of

    started = time.perf_counter()
    datasets.prepare(spec.dataset, data_dir)
    split = datasets.open_split(spec.dataset, "train", data_dir, spec.shape)
    module = models.of(spec)
    layout = modules.layout_of(module)
    memory.check()
    _test(job_id, spec, module, layout, device, memory, home)
    spare_the_collector()
    seconds, threads = round(time.perf_counter() - started, 1), torch.get_num_threads()
    log.info("loaded", job=job_id, seconds=seconds, device=str(device), threads=threads)
    make_replica = partial(replica_of, module=module, layout=layout, split=split, device=device)
    return SeatContext(module, layout, make_replica)


def _test(
    job_id: str,
    spec: JobSpec,
    module: "torch.nn.Module",
    layout: Layout,
    device: "torch.device",
    memory: SeatMemory,
    home: Path,
) -> None:
    """Compare the device's gradient of this model with the CPU's. Raises Unfit: they differ, or it does not fit."""
    from computeshare.training import selftest

    classes = catalog().datasets[spec.dataset].classes
    trial = selftest.check(selftest.Subject(spec.model, module, layout, spec.shape, classes), device, home)
    if trial.trouble:
        raise Unfit(f"{trial.trouble}. Run computeshare doctor --selftest there; a restarted worker is tested anew")
    memory.check(trial.saved_bytes)
    error, seconds = float(f"{trial.error:.1g}"), round(trial.seconds, 2)
    log.info("self-test passed", job=job_id, error=error, seconds=seconds)
