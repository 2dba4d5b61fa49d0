"""A seat's set-up before it joins: opens the data set, builds the model, checks memory, tests the device."""

import contextlib
from pathlib import Path

import structlog

from computeshare.errors import Unfit
from computeshare.jobspec.memory_estimate import does_not_fit, seat_bytes, stages_that_fit
from computeshare.jobspec.spec import JobSpec
from computeshare.training.work_units import Computation, MemoryMeter
from computeshare.types import Precision
from computeshare.worker.seat.trial_store import checked

log = structlog.get_logger()


class SeatMemory:
    """Checks the memory that a seat needs and uses on its device against the limit."""

    def __init__(self, spec: JobSpec, meter: MemoryMeter, allowed: int) -> None:
        """`allowed`: limit in bytes set by the worker's owner; 0: all of the device's memory."""
        self._spec, self._meter, self._allowed = spec, meter, allowed
        self._room = allowed or meter.room_bytes()
        self.needed_bytes = 0
        """Estimated bytes; measured bytes if the seat exceeded the limit."""
        self.saved_bytes: dict[Precision, int] = {}
        """By precision, as for `seat_bytes`."""

    @property
    def room_bytes(self) -> int:
        """What is left of the limit for a model, now."""
        own = self._meter.resident_bytes() if self._meter.device_type == "cpu" else 0
        return max(1, self._room - own)

    def peak_bytes(self) -> int:
        """Peak memory use of the seat on its device."""
        return self._meter.peak_bytes()

    def fits(self, precision: Precision) -> bool:
        """Whether the seat's need in a precision is within the limit, by estimate."""
        with contextlib.suppress(Unfit):
            self.check(precision)
            return True
        return False

    def check(self, precision: Precision = "float32") -> None:
        """Estimate the memory that the seat needs in a precision. Raises Unfit: it exceeds the limit."""
        saved, meter = self.saved_bytes.get(precision, 0), self._meter
        about = meter.device_type, saved, meter.resident_bytes()
        self.needed_bytes = seat_bytes(self._spec, *about)
        stages = stages_that_fit(self._spec, self._room, *about)
        if why := does_not_fit(self.needed_bytes, self._room, False, by_flag=bool(self._allowed), stages=stages):
            raise Unfit(why)

    def check_taken(self) -> None:
        """Raise Unfit if the seat's peak use exceeds the owner's limit."""
        if not self._allowed:
            return
        taken = self.peak_bytes()
        if why := does_not_fit(taken, self._allowed, measured=True, by_flag=True):
            self.needed_bytes = taken
            raise Unfit(why)


def test_device(job_id: str, spec: JobSpec, computation: Computation, memory: SeatMemory, home: Path) -> None:
    """Compare the device's gradient of the job's model with the CPU's.

    Args:
        home: folder with the results of passed self-tests.
    Raises: Unfit: they differ, or the job does not fit.
    """
    memory.check()
    trial = checked(computation, home)
    if trial.trouble:
        raise Unfit(f"{trial.trouble}. Run computeshare doctor --selftest there; a restarted worker is tested anew")
    memory.saved_bytes["float32"] = trial.saved_bytes
    if spec.precision != "float32":
        memory.saved_bytes["bfloat16"] = computation.saved_bytes_in_bfloat16()
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
