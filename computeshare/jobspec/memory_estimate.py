"""An estimate of a seat's memory, used before it has been measured. Pure."""

import re

from computeshare.errors import SettingsError
from computeshare.jobspec.spec import JobSpec

TORCH_BYTES = 500_000_000
"""What a process has resident once it has imported torch."""
SMALLEST = 100_000_000
"""The smallest limit, in bytes: no seat runs with less."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(|k|m|g|t)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes from words such as `8GB`, `1.5g` or `512MiB` (a k is 1000, a Ki 1024).

    Raises: SettingsError: the text is not a size, or the size is below `SMALLEST`.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise SettingsError(f"{text!r} is not a size: give for example 8GB, 1.5GB or 512MiB")
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])
    if size < SMALLEST:
        raise SettingsError(f"{text} is too small: allow at least 100MB, or 1GB for most jobs on a CPU")
    return size


def allowed_bytes(text: str | None) -> int:
    """The limit `--max-memory` in bytes; 0, no limit, for None."""
    return parse_size(text) if text else 0


def seat_bytes(spec: JobSpec, device: str, saved_bytes: int = 0, resident_bytes: int = TORCH_BYTES) -> int:
    """Estimate a seat's peak memory, in bytes.

    Args:
        device: its kind: `cpu`, `mps` or `cuda`. Beside the CPU, what the process itself has resident does not count.
        saved_bytes: what the forward pass keeps of each sample for the backward pass, where that is known.
        resident_bytes: what the process has resident before it has a model.
    """
    vectors = 4 + spec.strategy.extra_vectors  # weights, the next ones, the gradient, an update on its way; what else
    own = resident_bytes if device == "cpu" else 0
    return own + 4 * spec.parameters * vectors + saved_bytes * (spec.micro_batch // spec.accumulate)


def does_not_fit(needed_bytes: int, room_bytes: int, measured: bool, by_flag: bool) -> str | None:
    """Why a seat that needs `needed_bytes` does not fit, and what to do; None if it fits."""
    if needed_bytes <= room_bytes:
        return None
    takes = f"{'needs' if measured else 'needs about'} {_size(needed_bytes)}"
    if by_flag:
        allowed = f"--max-memory allows ({_size(room_bytes)})"
        return f"the job {takes}, more than {allowed}: raise --max-memory or accumulate, or lower micro_batch"
    return f"the job {takes}, more than the device has ({_size(room_bytes)}): raise accumulate or lower micro_batch"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def device_type(described: str) -> str:
    """The kind of a device in words such as `cpu (x86_64)` or `cuda:1`."""
    return re.split("[ :]", described, maxsplit=1)[0]
