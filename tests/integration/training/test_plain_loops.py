"""Jobs with each field of training beside a plain PyTorch loop that does the same with torch's own tools."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.transforms import v2

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Weights
from computeshare.training.computation import replica_of
from computeshare.training.server_step import ServerStep
from computeshare.types import Vector

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDS = 60
CPU = torch.device("cpu")
JOB: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "micro_batch": 32,
    "micro_batches_per_round": 1,
    "rounds": ROUNDS,
    "codec": {"up": "float32", "down": "float32"},
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
}
LOCAL = {
    "kind": "local",
    "inner_steps": 5,
    "replicas": 1,
    "inner_optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}


def instance_of(spec: JobSpec, data_dir: Path = Path()) -> TaskInstance:
    return task_of(spec).instance(spec.seed, "train", data_dir)


def trained(spec: JobSpec, data_dir: Path = Path()) -> Vector:
    """The parameters that a job ends with, without its processes; the moving average, where it keeps one."""
    instance = instance_of(spec, data_dir)
    step, replica = ServerStep(spec, instance.layout), replica_of(spec, instance, CPU)
    model = step.load(weights_of(instance.module, instance.layout), b"")
    for version in range(1, spec.rounds_total + 1):
        replica.load(model.published)
        units = spec.plan.round(version - 1).units
        updates = [replica.compute(unit) for unit in units]
        parts = [(update.vector, update.buffers) for update in updates]
        model = step.step(version, model, parts, [spec.plan.unit_size(unit) for unit in units])
    average = step.averaged(model.published)
    return average.parameters if average else model.master


def batches(spec: JobSpec, instance: TaskInstance) -> Iterable[tuple[Tensor, Tensor]]:
    for number in range(spec.rounds_total * spec.plan.micro_batches_per_round):
        yield instance.split.batch(spec.plan.indices(number))


def augmented(spec: JobSpec, instance: TaskInstance) -> Iterable[tuple[Tensor, Tensor]]:
    """The same batches, with each image cropped, mirrored and changed by RandAugment as torchvision does it."""
    assert isinstance(instance.split, ImageSplit)
    for number in range(spec.rounds_total):
        changed, samples = [], spec.plan.indices(number)
        for sample, seed in zip(samples, spec.plan.sample_seeds(number).tolist(), strict=True):
            top, left, mirrored = ((seed >> 16 * place & 0xFFFF) * count >> 16 for place, count in enumerate((3, 3, 2)))
            image = v2.functional.pad(torch.from_numpy(instance.split.images[sample]), [1])
            image = v2.functional.crop(image, top, left, 8, 8)
            image = v2.functional.horizontal_flip(image) if mirrored else image
            torch.manual_seed(seed)
            levels = np.asarray(v2.RandAugment()(Image.fromarray(np.rint(image[0].numpy() * (255 / 16)).astype("u1"))))
            changed.append(np.rint(levels * (16 / 255)).astype(np.uint8)[None])
        yield instance.split.normalise(np.stack(changed)), torch.from_numpy(instance.split.labels[samples])


def in_pieces(module: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Gradient accumulation as in every tutorial."""
    for some, theirs in zip(images.chunk(4), labels.chunk(4), strict=True):
        loss = functional.cross_entropy(module(some), theirs)
        (loss / 4).backward()  # type: ignore[no-untyped-call]


Loss = Callable[[Tensor, Tensor], Tensor]


def plain(
    spec: JobSpec,
    scheduled: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    clip: float = 0,
    grouped: bool = False,
    loss: Loss = functional.cross_entropy,
    batches: Callable[[JobSpec, TaskInstance], Iterable[tuple[Tensor, Tensor]]] = batches,
    decay: float = 0,
    autocast: bool = False,
) -> Vector:
    """The loop of every tutorial, with torch's scheduler, clipping and parameter groups."""
    instance = instance_of(spec)
    module = instance.module.train()
    optimizer = torch.optim.SGD(groups(module, grouped), lr=0.05, momentum=0.9, weight_decay=0.01)
    scheduler = scheduled(optimizer) if scheduled else None
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(module)  # its first update copies the weights: those of version 0
    for images, labels in batches(spec, instance):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(module(images), labels)
        value.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        average.update_parameters(module)
    return weights_of(average.module if decay else module, instance.layout).parameters


def groups(module: nn.Module, grouped: bool) -> list[Any]:
    if not grouped:
        return [*module.parameters()]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return [{"params": [p for p in module.parameters() if p.ndim >= 2]}, {"params": vectors, "weight_decay": 0.0}]


def cosine(step: int) -> float:
    """nanoGPT's learning rate, as a fraction: 10 steps of warm-up, then by a cosine to a tenth."""
    if step < 10:
        return (step + 1) / 11
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 10) / (ROUNDS - 10)))


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"schedule": {"name": "cosine", "warmup": 10, "final": 0.1}}, {"scheduled": lambda o: LambdaLR(o, cosine)}),
    (
        {"schedule": {"name": "linear", "final": 0.25}},
        {"scheduled": lambda o: LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=ROUNDS)},
    ),
    ({"schedule": {"name": "step", "final": 0.01}}, {"scheduled": lambda o: MultiStepLR(o, [30, 45], gamma=0.1)}),
    ({"clip_norm": 0.5}, {"clip": 0.5}),
    ({"decay": "matrices"}, {"grouped": True}),
    ({"label_smoothing": 0.1}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    ({"ema": 0.9}, {"decay": 0.9}),
    ({"precision": "bfloat16"}, {"autocast": True}),
    ({"augment": ["crop", "flip", "randaugment"], "rounds": 20}, {"batches": augmented}),
]


@pytest.mark.parametrize(("fields", "options"), CASES, ids=[str(fields) for fields, _ in CASES])
@pytest.mark.slow
def test_a_job_ends_with_the_weights_of_a_plain_loop(fields: dict[str, Any], options: dict[str, Any]) -> None:
    spec = JobSpec.model_validate({**JOB, **fields})
    ours = trained(spec)
    np.testing.assert_allclose(ours, plain(spec, **options), rtol=0, atol=1e-6)
    without = JobSpec.model_validate({**JOB, "rounds": spec.rounds})
    assert np.abs(ours - trained(without)).max() > 1e-3, "the field has no effect"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inner_steps_are_clipped_scheduled_and_decayed_as_in_a_plain_loop(precision: str) -> None:
    fields = {"schedule": {"name": "linear", "final": 0.1}, "clip_norm": 0.5, "decay": "matrices", "strategy": LOCAL}
    job = {**JOB, **fields, "precision": precision, "rounds": 12}
    spec = JobSpec.model_validate({k: v for k, v in job.items() if k not in ("optimizer", "micro_batches_per_round")})
    instance = instance_of(spec)
    module = instance.module.train()
    for number, (images, labels) in enumerate(batches(spec, instance)):
        if number % 5 == 0:  # the inner optimizer starts afresh with every round
            optimizer = torch.optim.SGD(groups(module, True), lr=0.05, momentum=0.9, weight_decay=0.1)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - 0.9 * number / 60)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = functional.cross_entropy(module(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = weights_of(module, instance.layout).parameters
    np.testing.assert_allclose(trained(spec), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", [{"kind": "sync"}, LOCAL], ids=["sync", "local"])
def test_pieces_of_a_micro_batch_add_up_as_in_a_plain_loop(strategy: dict[str, Any]) -> None:
    job: dict[str, Any] = {**JOB, "accumulate": 4, "rounds": 4, "strategy": strategy}
    if strategy is LOCAL:
        job = {k: v for k, v in job.items() if k not in ("optimizer", "micro_batches_per_round")}
    spec = JobSpec.model_validate(job)
    instance = instance_of(spec)
    module = instance.module.train()
    for number, (images, labels) in enumerate(batches(spec, instance)):
        if number == 0 or (strategy is LOCAL and number % 5 == 0):  # the inner optimizer starts afresh with every round
            decay = 0.1 if strategy is LOCAL else 0.01
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
        optimizer.zero_grad()
        in_pieces(module, images, labels)
        optimizer.step()
    expected = weights_of(module, instance.layout).parameters
    np.testing.assert_allclose(trained(spec), expected, rtol=0, atol=1e-6)


def test_a_gpt_ends_with_the_weights_of_nanogpts_loop(shakespeare_dir: Path) -> None:
    spec = JobSpec.model_validate(
        {
            **JOB,
            "dataset": "tinyshakespeare",
            "model": "gpt",
            "model_args": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
            "micro_batch": 12,
            "optimizer": {"name": "AdamW", "lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1},
            "schedule": {"name": "cosine", "warmup": 10, "final": 0.1},
            "clip_norm": 1.0,
            "decay": "matrices",
        }
    )
    instance = instance_of(spec, shakespeare_dir)
    module = instance.module.train()
    optimizer = torch.optim.AdamW(groups(module, True), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    scheduler, losses = LambdaLR(optimizer, cosine), list[float]()
    for symbols, targets in batches(spec, instance):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(symbols).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert np.array_equal(trained(spec, shakespeare_dir), weights_of(module, instance.layout).parameters)
    assert losses[0] > 4 and losses[-1] < 3.2, losses


def test_a_state_is_gone_on_from_at_another_rate() -> None:
    """A fork keeps the momentum and takes its own rate."""
    spec = JobSpec.model_validate(JOB)
    slower = JobSpec.model_validate({**JOB, "optimizer": {**JOB["optimizer"], "lr": 0.005}})
    layout = instance_of(spec).layout
    zeros, gradient = np.zeros(layout.parameters, np.float32), np.ones(layout.parameters, np.float32)
    buffers = Weights(zeros, np.empty(0, np.float32), np.empty(0, np.int64))
    parent, fork = ServerStep(spec, layout), ServerStep(slower, layout)
    first = parent.step(1, parent.load(buffers, b""), [(gradient, buffers.buffers)], [32])
    state = b"".join(bytes(part) for part in parent.dump(first.master))
    begun = fork.load(first.published, state)
    second = fork.step(2, begun, [(gradient, buffers.buffers)], [32])
    moved = (first.master - second.master).mean()
    decayed = 1 + 0.01 * first.master.mean()
    assert moved == pytest.approx(0.005 * (0.9 * 1 + decayed), rel=1e-4)
