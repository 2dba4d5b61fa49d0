"""An estimate of a seat's memory, used before it has been measured. Pure."""

from computeshare.errors import SettingsError
from computeshare.jobspec.machine_needs import parse_size, size_text
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.base import LEAST_VECTORS, MOST_STAGES

TORCH_BYTES = 500_000_000
"""Resident bytes of a process that has imported torch."""
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
    fixed, vectors = _parts(spec, device, saved_bytes, resident_bytes)
    return fixed + vectors // (spec.strategy.staging.stages if spec.strategy.staging else 1)


def stages_that_fit(
    spec: JobSpec, room_bytes: int, device: str, saved_bytes: int = 0, resident_bytes: int = TORCH_BYTES
) -> int:
    """The fewest stages of equal size of which a seat can hold one in `room_bytes`, by the estimate of `seat_bytes`; 0:
    the strategy has none, or no number suffices.
    """
    fixed, vectors = _parts(spec, device, saved_bytes, resident_bytes)
    counts = range(2, MOST_STAGES + 1) if spec.strategy.staging else ()
    return next((count for count in counts if fixed + vectors // count <= room_bytes), 0)


def _parts(spec: JobSpec, device: str, saved_bytes: int, resident_bytes: int) -> tuple[int, int]:
    """Bytes of a seat's memory that stages do not change, and of the whole model's vectors."""
    own = resident_bytes if device == "cpu" else 0
    vectors = LEAST_VECTORS + spec.largest_strategy.extra_vectors
    return own + saved_bytes * (spec.micro_batch // spec.accumulate), 4 * spec.parameters * vectors


def does_not_fit(needed_bytes: int, room_bytes: int, measured: bool, by_flag: bool, stages: int = 0) -> str | None:
    """Why a seat that needs `needed_bytes` does not fit, and what to do; None if it fits.

    Args:
        stages: with so many stages it would fit, as `stages_that_fit`; 0: more stages are no remedy.
    """
    if needed_bytes <= room_bytes:
        return None
    takes = f"{'needs' if measured else 'needs about'} {size_text(needed_bytes)}"
    has = f"{'--max-memory allows' if by_flag else 'the device has'} ({size_text(room_bytes)})"
    remedies = [f"raise strategy.stages to {stages} or more,"] if stages else []
    remedies += ["raise --max-memory or accumulate," if by_flag else "raise accumulate" + ("," if stages else "")]
    return f"the job {takes}, more than {has}: {' '.join(remedies)} or lower micro_batch"
