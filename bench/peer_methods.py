"""How ranks of torch train together: by the gradients of every step, or by their weights after so many steps."""

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from bench import torchft_diloco

EVERY = 50
"""Local steps between two averages."""
FIRST_PASSES = 2
"""Passes after which DistributedDataParallel no longer changes its buckets, which PowerSGD's memory relies on."""
WHOLE_MB = 4096
"""A bucket for all gradients at once: PowerSGD sends three messages per bucket, one after another."""
TIMED_STEPS = 8

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], None]
"""Trains on a batch."""
OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]
Loss = Callable[[nn.Module, Batch], Tensor]
Build = Callable[[nn.Module, OptimizerOf, Loss, Batch], Step]
"""Makes a rank's step from its model, its optimizer, its loss and any batch, which it does not train on."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train together. After each `every` steps, all ranks have the same weights."""

    label: str
    build: Build
    every: int = 1


def compute_s(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> float:
    """Seconds of a step without communication, on a copy of the model."""
    clone = copy.deepcopy(module)
    step = _step(clone, optimizer_of(clone.parameters()), loss)
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            step(batch)
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            step(batch)
    return (time.perf_counter() - began) / TIMED_STEPS


def _step(model: nn.Module, optimizer: Optimizer, loss: Loss) -> Step:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _plain(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
    return _step(DistributedDataParallel(module), optimizer_of(module.parameters()), loss)


def _half(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
    model = DistributedDataParallel(module, broadcast_buffers=False)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _step(model, optimizer_of(module.parameters()), loss)


def _power(rank: int) -> Build:
    """PowerSGD from the first step on, with error feedback and a warm start, all gradients in one bucket."""

    def hook(
        state: powerSGD_hook.PowerSGDState,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        if state.iter >= state.start_powerSGD_iter:
            return powerSGD_hook.powerSGD_hook(state, bucket)
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        done = torch.futures.Future[Tensor]()
        done.set_result(bucket.buffer())
        return done

    def build(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
        model = DistributedDataParallel(module, broadcast_buffers=False, bucket_cap_mb=WHOLE_MB)
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=FIRST_PASSES)
        model.register_comm_hook(state, hook)
        before = copy.deepcopy(module.state_dict())
        with torch.random.fork_rng(devices=[]):
            for _ in range(FIRST_PASSES):  # nothing is sent, and nothing learned
                loss(model, batch).backward()  # type: ignore[no-untyped-call]
        module.load_state_dict(before)
        return _step(model, optimizer_of(module.parameters()), loss)

    return build


def _local(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
    """Local SGD: each rank steps alone; then one all-reduce averages parameters and buffers."""
    own, numbers = _step(module, optimizer_of(module.parameters()), loss), itertools.count(1)
    averaged = [*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())]

    def step(batch: Batch) -> None:
        own(batch)
        if next(numbers) % EVERY == 0:
            with torch.no_grad():
                total = parameters_to_vector(averaged)
                dist.all_reduce(total)
                vector_to_parameters(total / dist.get_world_size(), averaged)

    return step


def _post_local(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
    """torch's post-local SGD, local from the first step on."""
    model = DistributedDataParallel(module, broadcast_buffers=False)
    state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        None, None, 0, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(EVERY, warmup_steps=EVERY - 1)
    return _step(model, PostLocalSGDOptimizer(optimizer_of(module.parameters()), averager), loss)


def _diloco(module: nn.Module, optimizer_of: OptimizerOf, loss: Loss, batch: Batch) -> Step:
    optimizer = optimizer_of(module.parameters())
    kept, own = torchft_diloco.begin(module, optimizer, EVERY), _step(module, optimizer, loss)

    def step(batch: Batch, _: object = kept) -> None:
        own(batch)

    return step


METHODS: Mapping[str, Method] = {
    "ddp": Method("DDP", _plain),
    "fp16": Method("DDP, fp16 hook", _half),
    "powersgd2": Method("DDP, PowerSGD rank 2", _power(2)),
    "powersgd4": Method("DDP, PowerSGD rank 4", _power(4)),
    "local": Method(f"local SGD, {EVERY} steps", _local, EVERY),
    "post-local": Method(f"post-local SGD, {EVERY} steps", _post_local, EVERY),
    **({"diloco": Method(f"torchft's DiLoCo, {EVERY} steps", _diloco, EVERY)} if torchft_diloco.is_installed() else {}),
}
