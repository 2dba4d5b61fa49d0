"""A seat's memory against what its worker's owner allows."""

import pytest
import torch

from computeshare.errors import Unfit
from computeshare.jobspec.spec import JobSpec
from computeshare.worker.seat.seat_setup import SeatMemory

SPEC = JobSpec(dataset="digits", model="mlp")
CPU = torch.device("cpu")


def test_a_job_that_needs_more_than_is_allowed_is_refused_before_it_starts() -> None:
    memory = SeatMemory(SPEC, CPU, allowed=1_000_000)
    with pytest.raises(Unfit, match="--max-memory"):
        memory.check()
    assert memory.needed_bytes > 1_000_000


def test_a_seat_that_took_more_than_is_allowed_ends_with_the_measured_bytes() -> None:
    memory = SeatMemory(SPEC, CPU, allowed=1_000_000)
    with pytest.raises(Unfit, match="--max-memory"):
        memory.check_taken()
    assert memory.needed_bytes == pytest.approx(memory.peak_bytes(), rel=0.1)


def test_where_nothing_is_set_only_the_room_of_the_device_counts() -> None:
    memory = SeatMemory(SPEC, CPU, allowed=0)
    memory.check()
    memory.check_taken()
    assert memory.needed_bytes > 0, "estimated"
