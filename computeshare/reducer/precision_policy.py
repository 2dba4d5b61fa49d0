"""The choice of a job's precision from its workers' measurements; once, before the job opens. Pure."""

from collections.abc import Sequence

from computeshare.codecs.measured_link import MeasuredLink, shown
from computeshare.types import Precision

LEAST_GAIN = 1.05
"""The speed-up for which bfloat16 is chosen; a smaller one is within the variation of measurements."""


def choose_precision(measured: Sequence[MeasuredLink]) -> tuple[Precision, str]:
    """bfloat16 if the slowest worker gains enough by it, or float32 does not fit every worker; and the reason, for the
    job's users.

    The slowest worker counts because a round waits for it.

    Args:
        measured: with `precisions`; one for each worker that will take part, at least one.
    """
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision, other in (precisions, precisions[::-1]):
        if unfit := sum(precision not in one.precisions for one in measured):
            return other, f"{other}, because {precision} does not fit the memory of {unfit} of {len(measured)} workers"
    whole_s, half_s = (max(one.precisions[precision] for one in measured) for precision in precisions)
    chosen: Precision = "bfloat16" if whole_s >= LEAST_GAIN * half_s else "float32"
    times = f"{shown(1000 * whole_s)} ms for a micro-batch in float32, {shown(1000 * half_s)} ms in bfloat16"
    return chosen, f"{chosen}, because the slowest worker takes {times}"
