"""Self-test of a device: compares its gradient of a model with the CPU's before its updates count.

A device can be wrong without an error: an accelerator's convolution that is off by a percent trains a model that is
merely worse. Some such faults begin with the second call, so the same gradient is computed three times.

Two correct devices differ, too: a deep network may magnify rounding a thousandfold (BatchNorm over few values), and a
ReLU whose input is zero but for rounding passes a gradient on only one of the devices. If a device's gradient is far
from the CPU's, the CPU's own gradients for inputs that differ by rounding are compared; if these are far apart as well,
the batch proves nothing, and another batch is tried.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from computeshare.jobspec.sampling_plan import Plan, Seeds
from computeshare.tasks.base import Batch, Indices, TaskInstance, tensors
from computeshare.tensors.layout import Layout
from computeshare.training import devices
from computeshare.training.execution import PLAIN, Execution
from computeshare.training.replica import Replica
from computeshare.training.work_units import SelfTestResult
from computeshare.types import Vector

TIMES = 3
SAMPLES = 8
"""Samples in the batch: few, so that the test takes a small part of a micro-batch's time."""
TOLERANCE = 1e-3
"""Largest allowed relative L2 distance between a device's gradient and the CPU's, in float32."""
LEAST_SHARE = 0.01
"""A tensor's distance is taken relative to this part of the whole gradient's norm at least: a gradient that is zero but
for rounding (of a bias before a BatchNorm) has no relative distance of its own."""
BATCHES = 4
"""Most batches to try until a batch tells a wrong device from rounding."""
NUDGE, NUDGES = 1e-6, 3
"""Size of the noise added to inputs of about 1 to measure the effect of rounding, and number of trials."""
_RANDOM_LAYERS = ("Dropout", "StochasticDepth")


@dataclass(frozen=True, slots=True)
class TrialBatch:
    """Names a fixed batch of noise; a `nudge` above 0 names a variant that differs by rounding."""

    number: int = 0
    nudge: int = 0


Compute = Callable[[], Vector]
"""Computes the gradient (d,) of one batch."""
Make = Callable[[torch.device, TrialBatch], Compute]
"""Builds a `Compute` on a device."""
CPU = torch.device("cpu")


def run(subject: TaskInstance, device: torch.device) -> SelfTestResult:
    """Test a device with a model, as a worker computes it."""
    return check(subject.task.name, subject.layout, device, partial(gradient_of, subject))


def check(name: str, layout: Layout, device: torch.device, make: Make) -> SelfTestResult:
    """Test a device with the gradients (d,) of a batch that `make` builds.

    Args:
        name: of what is computed, for people.
        layout: of its parameters.
    """
    started = time.perf_counter()
    with _in_float32(), _saved(layout) as sizes:
        compute = make(CPU, TrialBatch())
        reference = compute()
        saved_bytes = sum(sizes) // SAMPLES
        if device.type == "cpu":
            error, trouble = repeated(compute, reference, layout)
        else:
            del compute
            error, trouble = compare_gradients(layout, device, reference, make)
    told = f"its {devices.describe(device)} computes {name} wrongly: {trouble}" if trouble else ""
    return SelfTestResult(error, time.perf_counter() - started, saved_bytes, told)


def saved_bytes_in_bfloat16(subject: TaskInstance) -> int:
    """The bytes per sample that the forward pass saves for the backward pass under bfloat16 autocast."""
    with _saved(subject.layout) as sizes:
        gradient_of(subject, CPU, TrialBatch(), Execution("bfloat16"))()
    return sum(sizes) // SAMPLES


def gradient_of(
    subject: TaskInstance, device: torch.device, batch: TrialBatch, execution: Execution = PLAIN
) -> Compute:
    """Build the gradient of a copy of the model, with its random layers switched off."""
    module, task = copy.deepcopy(subject.module), subject.task
    samples = task.noise(SAMPLES, batch.number).batch(np.arange(SAMPLES))
    if batch.nudge:
        _nudge(module, samples, np.random.Generator(np.random.PCG64([batch.number, batch.nudge])))
    instance = TaskInstance(task, module, subject.layout, _Fixed(samples))
    replica = Replica(instance, Plan(0, SAMPLES, SAMPLES, 1), device, execution=execution)
    still(module)
    return lambda: replica.compute(0).vector


def still(module: nn.Module) -> None:
    """Switch a module's random layers off: devices draw different numbers."""
    for layer in module.modules():
        if type(layer).__name__.startswith(_RANDOM_LAYERS):
            layer.eval()


def repeated(compute: Compute, first: Vector, layout: Layout) -> tuple[float, str]:
    """Check that a computation repeats the bits of `first`. Returns the distance and the fault, empty if none."""
    if not np.isfinite(first).all():
        return math.inf, "the first of its gradients is not finite"
    for call in range(2, TIMES + 1):
        found = compute()
        if not np.array_equal(found, first):
            error, tensor = distance(found, first, layout)
            return error, f"gradient {call} of the same batch is {_apart(error)} from the first, most in {tensor}"
    return 0.0, ""


def compare_gradients(layout: Layout, device: torch.device, reference: Vector, make: Make) -> tuple[float, str]:
    """Compare a device's gradients with the CPU's. Returns the distance and the fault, empty if none.

    Args:
        reference: the CPU's gradient (d,) of the first batch.
    """
    found = []
    for number in range(BATCHES):
        if number:
            reference = make(CPU, TrialBatch(number))()
        error, trouble = agreement(make(device, TrialBatch(number)), reference, layout)
        if not trouble:
            return error, ""
        rounding = max(_rounding(layout, TrialBatch(number, nudge), reference, make) for nudge in range(1, NUDGES + 1))
        if rounding <= TOLERANCE / 4 or not math.isfinite(error):
            return error, trouble
        found.append((error / rounding, error, trouble))
    ratio, error, trouble = min(found)
    return (error, "") if ratio <= 4 else (error, trouble)


def _rounding(layout: Layout, batch: TrialBatch, reference: Vector, make: Make) -> float:
    """Distance of the CPU's gradient from `reference` if noise the size of rounding is added to the inputs."""
    return distance(make(CPU, batch)(), reference, layout)[0]


def agreement(compute: Compute, reference: Vector, layout: Layout) -> tuple[float, str]:
    """Check that each of several computations is close to `reference`. Returns the largest distance and the fault."""
    worst = 0.0
    for call in range(1, TIMES + 1):
        error, tensor = distance(compute(), reference, layout)
        worst = max(worst, error)
        if error > TOLERANCE:
            before = f", though gradient {call - 1} of the same batch was right" if call > 1 else ""
            return error, f"gradient {call} is {_apart(error)} from the CPU's, most in {tensor}{before}"
    return worst, ""


def distance(found: Vector, reference: Vector, layout: Layout) -> tuple[float, str]:
    """The largest relative L2 distance of a tensor's gradient (infinite if not finite), and the tensor's name."""
    floor = LEAST_SHARE * float(np.linalg.norm(reference))
    worst, name = 0.0, ""
    for tensor in layout.tensors:
        if tensor.kind == "parameter":
            there, here = reference[tensor.start : tensor.stop], found[tensor.start : tensor.stop]
            scale = max(float(np.linalg.norm(there)), floor)
            apart = float(np.linalg.norm(here - there))
            error = math.inf if not math.isfinite(apart) else apart / scale if apart else 0.0
            if error > worst:
                worst, name = error, tensor.name
    return worst, name


def _apart(error: float) -> str:
    return f"{100 * error:.2g} %" if math.isfinite(error) else "infinitely far"


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A split of one batch, returned for any indices."""

    samples: Batch

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> Batch:
        return self.samples


def _nudge(module: nn.Module, batch: Batch, source: np.random.Generator) -> None:
    """Add noise the size of rounding to a batch's floating-point inputs, or to the parameters if it has none."""
    inputs = [tensor for tensor in tensors(batch) if tensor.is_floating_point()]
    with torch.no_grad():
        for tensor in inputs or module.parameters():
            noise = torch.from_numpy(source.standard_normal(tuple(tensor.shape), np.float32))
            tensor.add_(noise, alpha=NUDGE * (1 if inputs else float(tensor.abs().mean())))


@contextmanager
def _in_float32() -> Iterator[None]:
    """Make CUDA compute in full float32; by default its convolutions round their factors to 10 bits (TF32)."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32, matmul.allow_tf32 = False, False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@contextmanager
def _saved(layout: Layout) -> Iterator[list[int]]:
    """Collect the sizes in bytes of tensors that forward passes in the block save for the backward pass, except
    parameters and their casts, which are there once, whatever the samples.
    """
    sizes: list[int] = []
    seen: set[int] = set()
    model = 4 * layout.parameters

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and not (_is_weight(tensor) or storage.nbytes() == model):
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or made from one alone, as its cast to bfloat16 is."""
    if isinstance(tensor, nn.Parameter):
        return True
    made_by = tensor.grad_fn
    while made_by is not None and len(made_by.next_functions) == 1:
        made_by = made_by.next_functions[0][0]
    return type(made_by).__name__ == "AccumulateGrad"
