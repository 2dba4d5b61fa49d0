"""The self-test of a device, against devices that are wrong."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.text.language_model import LanguageModel
from computeshare.training import selftest
from computeshare.training.selftest import CPU, Compute, TrialBatch, gradient_of
from computeshare.training.work_units import SelfTestResult
from computeshare.types import Vector

OTHER = torch.device("mps")
"""Stands for an accelerator: what is computed on it is the test's to say, on the CPU."""


def subject(name: str = "lenet5", shape: tuple[int, int, int] = (1, 28, 28)) -> TaskInstance:
    return ImageClassification("digits", name, shape).on_noise(selftest.SAMPLES)


def device_with(
    fault: Callable[[int, Vector, TaskInstance], Vector], on: torch.device = OTHER
) -> Callable[..., Compute]:
    """A device that computes as the CPU does, and then does `fault` to what its n-th call gave."""

    def make(its: TaskInstance, device: torch.device, batch: TrialBatch) -> Compute:
        compute, calls = gradient_of(its, CPU, batch), 0

        def wrong() -> Vector:
            nonlocal calls
            calls += 1
            return fault(calls, compute(), its)

        return wrong if device == on else compute

    return make


def convolutions_off(vector: Vector, its: TaskInstance, by: float = 0.01) -> Vector:
    changed = vector.copy()
    for tensor in its.layout.tensors:
        if tensor.name.startswith("conv") or ".conv" in tensor.name:
            changed[tensor.start : tensor.stop] *= 1 + by
    return changed


def attention_off(call: int, vector: Vector, its: TaskInstance) -> Vector:
    changed = vector.copy()
    for tensor in its.layout.tensors:
        changed[tensor.start : tensor.stop] *= 1.01 if "attention" in tensor.name and call > 1 else 1
    return changed


def run(its: TaskInstance, device: torch.device, make: Callable[..., Compute]) -> SelfTestResult:
    return selftest.check(its.task.name, its.layout, device, partial(make, its))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_device_that_computes_as_the_cpu_does_passes() -> None:
    started = time.process_time()
    trial = run(subject(), OTHER, device_with(lambda _, vector, __: vector))
    assert trial.trouble == "" and trial.error == 0 and time.process_time() - started < 2


def test_convolutions_that_are_off_by_a_percent_from_the_second_call_on_are_found_and_named() -> None:
    wrong = device_with(lambda call, vector, its: convolutions_off(vector, its) if call > 1 else vector)
    trial = run(subject(), OTHER, wrong)
    assert trial.error == pytest.approx(0.01, rel=1e-3)
    assert "computes lenet5 wrongly: gradient 2 is 1 % from the CPU's, most in conv" in trial.trouble
    assert trial.trouble.endswith("though gradient 1 of the same batch was right")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_found(value: float) -> None:
    wrong = device_with(lambda call, vector, _: vector if call < 3 else np.full_like(vector, value))
    assert "gradient 3 is infinitely far from the CPU's" in run(subject(), OTHER, wrong).trouble


def test_a_cpu_that_does_not_repeat_its_bits_is_found() -> None:
    def flip(call: int, vector: Vector, _: TaskInstance) -> Vector:
        vector = vector.copy()
        vector[7] += np.float32(1e-3) if call == 3 else np.float32(0)
        return vector

    trouble = run(subject(), CPU, device_with(flip, CPU)).trouble
    assert "gradient 3 of the same batch is" in trouble and trouble.endswith("from the first, most in conv1.weight")


def test_this_machines_own_cpu_passes_with_and_without_random_layers() -> None:
    assert [selftest.run(subject(name), CPU).trouble for name in ("lenet5", "simplenet")] == ["", ""]


def test_a_language_model_is_tested_without_its_dropout() -> None:
    task = LanguageModel("tinyshakespeare", GptArgs(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=0.5))
    trial = run(task.on_noise(selftest.SAMPLES), OTHER, device_with(lambda _, vector, __: vector))
    assert trial.trouble == "" and trial.saved_bytes > 0
    assert run(task.on_noise(selftest.SAMPLES), OTHER, device_with(attention_off)).trouble


def rounded_otherwise(its: TaskInstance, device: torch.device, batch: TrialBatch) -> Compute:
    """A right device whose rounding differs from the CPU's."""
    return gradient_of(its, CPU, TrialBatch(batch.number, 101) if device == OTHER else batch)


def test_rounding_that_a_deep_network_magnifies_is_no_fault() -> None:
    deep = subject("shufflenet_v2_x0_5", (3, 32, 32))
    batches = [
        selftest.agreement(rounded_otherwise(deep, OTHER, batch), gradient_of(deep, CPU, batch)(), deep.layout)
        for batch in map(TrialBatch, range(selftest.BATCHES))
    ]
    assert all(trouble for _, trouble in batches)  # no batch of this network is within the tolerance
    assert run(deep, OTHER, rounded_otherwise).trouble == ""


def test_a_fault_larger_than_what_rounding_explains_is_found_in_such_a_network() -> None:
    deep = subject("shufflenet_v2_x0_5", (3, 32, 32))
    assert "computes shufflenet_v2_x0_5 wrongly" in run(deep, OTHER, device_with(lambda *a: -a[1])).trouble


def test_what_the_forward_pass_keeps_is_measured_for_a_sample() -> None:
    flat = subject("mlp", (1, 8, 8))
    values = 64 + 2 * 128 + 2 * 64 + 10  # of each layer its input; of a ReLU its result, which is the next one's input
    assert 4 * 200 <= selftest.run(flat, CPU).saved_bytes <= 4 * values
