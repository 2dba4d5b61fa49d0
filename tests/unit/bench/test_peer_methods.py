"""Torch's own remedies for thin links, as the benchmark runs them: all ranks agree, and all learn."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from bench.peer_methods import EVERY, METHODS, compute_s

pytestmark = pytest.mark.slow

RANKS = 2


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a task that a small model learns: which half of the inputs is larger."""
    images = torch.randn(32, 40, generator=torch.Generator().manual_seed(number))
    return images, (images[:, :20].sum(1) > images[:, 20:].sum(1)).long()


def _loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(module(images), labels)


def _train(rank: int, queue: Any, store: str) -> None:
    """As one rank, train twice as many steps as there may be between two averages; tell weights and accuracy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for method in METHODS.values():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))

        def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

        before = _digest(module)
        step = method.build(module, optimizer_of, _loss, _batch(0))
        seconds = compute_s(module, optimizer_of, _loss, _batch(0))
        unchanged = before == _digest(module)
        for number in range(2 * EVERY):
            step(_batch(RANKS * number + rank))
        images, labels = _batch(10_000)
        right = (module(images).argmax(1) == labels).float().mean().item()
        queue.put((rank, method.label, _digest(module), right, unchanged and seconds > 0))
    dist.barrier()
    dist.destroy_process_group()


def _digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def test_ranks_have_the_same_weights_after_their_last_average_and_have_learned(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (queue, str(tmp_path / "store"))
    ranks = [context.Process(target=_train, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    told = [queue.get(timeout=120) for _ in range(RANKS * len(METHODS))]
    for process in ranks:
        process.join(30)
    by_label: dict[str, list[Any]] = {}
    for _, label, *found in told:
        by_label.setdefault(label, []).append(found)
    assert by_label.keys() == {method.label for method in METHODS.values()}
    for label, found in by_label.items():
        assert len({digest for digest, *_ in found}) == 1, label
        assert all(right > 0.85 and untouched for _, right, untouched in found), (label, found)


@pytest.mark.parametrize("name", METHODS)
def test_steps_between_averages_divide_the_versions_that_are_scored(name: str) -> None:
    assert (6400 // (32 * RANKS)) % METHODS[name].every == 0
