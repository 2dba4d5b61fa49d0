"""A seat's memory against what its worker's owner allows."""

import numpy as np
import pytest
import torch

from computeshare.errors import Unfit
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training import selftest
from computeshare.training.computation import LocalComputation
from computeshare.training.memory import DeviceMemory
from computeshare.types import Precision
from computeshare.worker.seat.seat_setup import SeatMemory, trial_precisions

SPEC = JobSpec(dataset="digits", model="mlp")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
CPU = torch.device("cpu")
METER = DeviceMemory(CPU)


def test_a_job_that_needs_more_than_is_allowed_is_refused_before_it_starts() -> None:
    memory = SeatMemory(SPEC, METER, allowed=1_000_000)
    with pytest.raises(Unfit, match="--max-memory"):
        memory.check()
    assert memory.needed_bytes > 1_000_000


def test_a_seat_that_took_more_than_is_allowed_ends_with_the_measured_bytes() -> None:
    memory = SeatMemory(SPEC, METER, allowed=1_000_000)
    with pytest.raises(Unfit, match="--max-memory"):
        memory.check_taken()
    assert memory.needed_bytes == pytest.approx(memory.peak_bytes(), rel=0.1)


def test_where_nothing_is_set_only_the_room_of_the_device_counts() -> None:
    memory = SeatMemory(SPEC, METER, allowed=0)
    memory.check()
    memory.check_taken()
    assert memory.needed_bytes > 0, "estimated"


def test_a_job_of_any_precision_runs_where_one_of_them_fits() -> None:
    spec = SPEC.model_copy(update={"precision": "auto"})
    memory = SeatMemory(spec, METER, allowed=20_000_000_000)
    memory.saved_bytes = {"float32": 1_000_000_000, "bfloat16": 500_000_000}  # a sample; a micro-batch has 32
    assert trial_precisions(spec, memory) == ["bfloat16"]
    assert trial_precisions(SPEC, memory) == ["float32"]
    with pytest.raises(Unfit, match=r"needs about 3[2-5]"):
        memory.check("float32")
    memory.check("bfloat16")
    roomy = SeatMemory(spec, METER, allowed=50_000_000_000)
    roomy.saved_bytes = memory.saved_bytes
    assert trial_precisions(spec, roomy) == ["float32", "bfloat16"]


def test_a_trial_computes_in_its_precision_and_leaves_the_module_alone() -> None:
    instance = task_of(SPEC).on_noise(1437)
    before = weights_of(instance.module, instance.layout).parameters
    found = {one: LocalComputation(instance, CPU).trial(SPEC, one)([0, 1])[0] for one in PRECISIONS}
    apart = np.linalg.norm(found["float32"] - found["bfloat16"]) / np.linalg.norm(found["float32"])
    assert 1e-4 < apart < 0.05
    assert np.array_equal(weights_of(instance.module, instance.layout).parameters, before)
    assert selftest.saved_bytes_in_bfloat16(instance) > 0
