"""The self-tests that this machine has passed, kept in its home, so that each is done once."""

import contextlib
import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from computeshare import __version__
from computeshare.runtime.private_files import write_private
from computeshare.training import devices
from computeshare.training.work_units import Computation, SelfTestResult

FOLDER = "selftests"


def checked(computation: Computation, home: Path) -> SelfTestResult:
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


def _identity(computation: Computation) -> str:
    """Hash of everything that a trial depends on: model, input, the device and its kind, versions of the software."""
    about = [computation.identity, __version__, computation.kind, computation.device, devices.system()]
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _remembered(path: Path) -> SelfTestResult | None:
    try:
        trial = SelfTestResult(**json.loads(path.read_bytes()))
        return trial if not trial.trouble and trial.saved_bytes >= 0 and trial.error >= 0 else None
    except (OSError, ValueError, TypeError):
        return None
