"""torch DistributedDataParallel over gloo: the peer, on the same model, data and batches."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from computeshare.catalog import catalog
from computeshare.embedded import free_port
from computeshare.spec import JobSpec
from computeshare.training import datasets, models

WARM_UP = 0.1
"""Share of the rounds that is not timed, at the start."""


def rounds_per_second(spec: JobSpec, data_dir: Path, workers: int) -> float:
    """Train with `workers` processes, one micro-batch each per round; one thread each."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    address = f"tcp://127.0.0.1:{free_port()}"
    arguments = (workers, address, spec.model_dump_json(), data_dir, answers)
    mp.start_processes(_train, args=arguments, nprocs=workers, start_method="spawn")
    return float(answers.get())


def _train(rank: int, workers: int, address: str, raw: str, data_dir: Path, answers: mp.SimpleQueue) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=workers)
    spec = JobSpec.model_validate_json(raw)
    split = datasets.open_split(spec.dataset, "train", data_dir, spec.shape)
    module = models.build(spec.model, spec.shape, catalog().datasets[spec.dataset].classes, spec.seed)
    model = DistributedDataParallel(module.train())
    optimizer = getattr(torch.optim, spec.optimizer.name)(model.parameters(), **spec.optimizer.arguments)
    warm = int(WARM_UP * spec.rounds_total)
    started = time.perf_counter()
    for version in range(spec.rounds_total):
        if version == warm:
            started = time.perf_counter()
        images, labels = split.batch(spec.plan.indices(spec.plan.round(version).first + rank))
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        answers.put((spec.rounds_total - warm) / (time.perf_counter() - started))
    dist.destroy_process_group()
