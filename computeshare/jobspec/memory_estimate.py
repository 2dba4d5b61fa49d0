"""An estimate of a seat's memory, used before it has been measured. Pure."""

from computeshare.errors import SettingsError
from computeshare.jobspec.machine_needs import parse_size, size_text
from computeshare.jobspec.spec import JobSpec

TORCH_BYTES = 500_000_000
"""What a process has resident once it has imported torch."""
SMALLEST = 100_000_000
"""The smallest limit, in bytes: no seat runs with less."""


def allowed_bytes(text: str | None) -> int:
    """The limit `--max-memory` in bytes; 0, no limit, for None.

    Raises: SettingsError: the text is not a size, or the size is below `SMALLEST`.
    """
    size = parse_size(text) if text else 0
    if text and size < SMALLEST:
        raise SettingsError(f"{text} is too small: allow at least 100MB, or 1GB for most jobs on a CPU")
    return size


def seat_bytes(spec: JobSpec, device: str, saved_bytes: int = 0, resident_bytes: int = TORCH_BYTES) -> int:
    """Estimate a seat's peak memory, in bytes; where the model is split into stages, with one stage of equal ones.

    Args:
        device: its kind: `cpu`, `mps` or `cuda`. Beside the CPU, what the process itself has resident does not count.
        saved_bytes: what the forward pass keeps of each sample for the backward pass, where that is known.
        resident_bytes: what the process has resident before it has a model.
    """
    vectors = 4 + spec.strategy.extra_vectors  # weights, the next ones, the gradient, an update on its way; what else
    own = resident_bytes if device == "cpu" else 0
    stages = spec.strategy.staging.stages if spec.strategy.staging else 1
    return own + 4 * spec.parameters * vectors // stages + saved_bytes * (spec.micro_batch // spec.accumulate)


def does_not_fit(needed_bytes: int, room_bytes: int, measured: bool, by_flag: bool) -> str | None:
    """Why a seat that needs `needed_bytes` does not fit, and what to do; None if it fits."""
    if needed_bytes <= room_bytes:
        return None
    takes = f"{'needs' if measured else 'needs about'} {size_text(needed_bytes)}"
    if by_flag:
        allowed = f"--max-memory allows ({size_text(room_bytes)})"
        return f"the job {takes}, more than {allowed}: raise --max-memory or accumulate, or lower micro_batch"
    return f"the job {takes}, more than the device has ({size_text(room_bytes)}): raise accumulate or lower micro_batch"
