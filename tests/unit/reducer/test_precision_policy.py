"""Which precision is chosen for a job that leaves it open, by its workers' speeds and memory."""

import pytest

from computeshare.codecs.measured_link import MeasuredLink
from computeshare.reducer.precision_policy import choose_precision
from computeshare.types import Precision


def worker(**seconds: float) -> MeasuredLink:
    link = {"compute_s": 1.0, "up_bytes_per_s": 1.0, "down_bytes_per_s": 1.0, "messages": {}}
    return MeasuredLink.model_validate({**link, "precisions": seconds})


@pytest.mark.parametrize(
    ("workers", "precision", "reason"),
    [
        ([worker(float32=0.1051, bfloat16=0.1)], "bfloat16", "105 ms for a micro-batch in float32, 100 ms in bfloat16"),
        ([worker(float32=0.104, bfloat16=0.1)], "float32", "104 ms for a micro-batch in float32, 100 ms in bfloat16"),
        ([worker(float32=0.1, bfloat16=0.9)], "float32", "900 ms in bfloat16"),
        (
            [worker(float32=0.9994, bfloat16=1.2346)],
            "float32",
            "takes 999 ms for a micro-batch in float32, 1,235 ms in",
        ),
        (
            [worker(float32=0.01, bfloat16=0.001), worker(float32=0.1, bfloat16=0.12)],  # a round waits for the second
            "float32",
            "100 ms for a micro-batch in float32, 120 ms in bfloat16",
        ),
        ([worker(bfloat16=9.0), worker(float32=1.0, bfloat16=2.0)], "bfloat16", "not fit the memory of 1 of 2 workers"),
        ([worker(float32=9.0), worker(float32=9.0, bfloat16=1.0)], "float32", "bfloat16 does not fit the memory of 1"),
    ],
)
def test_bfloat16_is_taken_where_the_slowest_worker_gains_or_float32_does_not_fit(
    workers: list[MeasuredLink], precision: Precision, reason: str
) -> None:
    chosen, told = choose_precision(workers)
    assert chosen == precision and told.startswith(precision) and reason in told
