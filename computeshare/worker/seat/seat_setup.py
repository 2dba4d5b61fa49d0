"""A seat's checks before it joins: memory, and the device, whose passed self-tests are kept in the worker's home."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import structlog

from computeshare import __version__
from computeshare.errors import Unfit
from computeshare.jobspec.memory_estimate import does_not_fit, seat_bytes, stages_that_fit
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.private_files import write_private
from computeshare.training import devices
from computeshare.training.work_units import MemoryMeter, SelfTestResult
from computeshare.types import Kind, Precision

FOLDER = "selftests"
"""Where the home has the results of passed self-tests, so that each is done once."""
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
        """Bytes of the limit that are left for a model now."""
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


def trial_precisions(spec: JobSpec, memory: SeatMemory) -> list[Precision]:
    """The precisions to measure: the job's own or, where it is open, each that fits this machine's memory."""
    if spec.precision != "auto":
        return [spec.precision]
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    return [one for one in precisions if memory.fits(one)] or ["bfloat16"]


class Tested(Protocol):
    """What a device is tested with; as of a `Computation`."""

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def device(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    def test(self) -> SelfTestResult: ...


def passed(computation: Tested, home: Path, job: str) -> SelfTestResult:
    """As `checked`, for a job's seat. Raises Unfit: the device computes wrongly."""
    trial = checked(computation, home)
    if trial.trouble:
        raise Unfit(f"{trial.trouble}. Run computeshare doctor --selftest there; a restarted worker is tested anew")
    log.info("self-test passed", job=job, error=float(f"{trial.error:.1g}"), seconds=round(trial.seconds, 2))
    return trial


def checked(computation: Tested, home: Path) -> SelfTestResult:
    """Test a device with a model, or return the passed trial stored in `home`.

    Failed trials are not stored, so that a repaired machine is tested again.
    """
    path = home / FOLDER / f"{_identity(computation)}.json"
    if known := _remembered(path):
        return known
    trial = computation.test()
    if not trial.trouble:
        with contextlib.suppress(OSError):  # read-only or full: then it is tested again
            write_private(path, json.dumps(asdict(trial)))
    return trial


def _identity(computation: Tested) -> str:
    """Hash of everything that a trial depends on: model, input, the device and its kind, versions of the software."""
    about = [computation.identity, __version__, computation.kind, computation.device, devices.system()]
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _remembered(path: Path) -> SelfTestResult | None:
    try:
        trial = SelfTestResult(**json.loads(path.read_bytes()))
        return trial if not trial.trouble and trial.saved_bytes >= 0 and trial.error >= 0 else None
    except (OSError, ValueError, TypeError):
        return None
