"""Compares the samples per second of one worker with a plain PyTorch loop, in turns.

    python -m bench.single --seconds 60 --pairs 3

Both train a ResNet-18 on files in CIFAR-10's form (of noise), cropped and mirrored, with SGD, a cosine schedule and
bfloat16 autocast, with one thread; the worker by strategy `local`, with one replica. The loop is run in torch's order
of memory and in channels last; the faster one counts. Both read and augment images by the same code.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.course import WARM_UP
from bench.support.report import Part, Table, markdown, paired
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import channels_last
from computeshare.tasks.images.datasets import cifar
from computeshare.tasks.images.datasets.definitions import DEFINITIONS
from computeshare.tasks.registry import task_of

OPTIMIZER: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
ROUNDS = 10_000
"""More than there is time for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--seconds", type=float, default=60, help="for the worker, and for each loop")
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    document = {
        "name": f"bench: {options.model}, one worker",
        "dataset": "cifar10",
        "model": options.model,
        "micro_batch": options.micro_batch,
        "rounds": ROUNDS,
        "strategy": {
            "kind": "local",
            "inner_steps": options.inner_steps,
            "replicas": 1,
            "inner_optimizer": {"name": "SGD", **OPTIMIZER},
        },
        "schedule": {"name": "cosine"},
        "augment": ["crop", "flip"],
        "precision": "bfloat16",
        "threads": 1,
        "workers": {"min": 1, "max": 1},
        "checkpoint_every": 0,
        "evaluate_every": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_noise(Path(folder))
        os.environ["COMPUTESHARE_DATA"] = folder
        part = compare(document, options.pairs, options.seconds, Path(folder))
    print(markdown(part))
    if options.json:
        part.save(options.json)


def write_noise(data_dir: Path) -> None:
    """Write noise in the form of CIFAR-10's converted files."""
    rng, folder = np.random.default_rng(0), data_dir / DEFINITIONS["cifar10"].folder
    folder.mkdir(parents=True)
    for split, count in (("train", 50_000), ("test", 10_000)):
        records = np.empty(count, np.dtype([("label", np.uint8), ("image", np.uint8, (3, 32, 32))]))
        records["label"] = rng.integers(0, 10, count)
        records["image"] = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
        np.save(cifar.converted(folder, split), records)


def compare(document: dict[str, Any], pairs: int, seconds: float, data_dir: Path) -> Part:
    """Train with one worker and with the plain loops in turn, `pairs` times, for some seconds each."""
    spec, rates = JobSpec.model_validate_json(json.dumps(document)), []
    torch.set_num_threads(1)
    with ours.plane(1, data_dir) as plane:
        for _ in range(pairs):
            own = ours.train(plane, document, seconds, scored=False).course.samples_per_s
            loops = [plain(spec, data_dir, seconds, last) for last in (False, True)]
            rates.append((own, *loops))
            told = "worker {:6.1f}   plain loop {:6.1f}, channels last {:6.1f} samples/s".format(*rates[-1])
            print(told, file=sys.stderr, flush=True)
    best = [(own, max(loops)) for own, *loops in rates]
    ratios = [own / loop for own, loop in best]
    note = (
        f"Pairs: {pairs}; ratios from {min(ratios):.2f} to {max(ratios):.2f}. Plain loop: the faster order in memory."
    )
    columns = ["median of", "ComputeShare", "plain loop", "ratio"]
    table = Table(f"One worker, {spec.model} in bfloat16", columns, [paired("samples/s", best)], note)
    return Part([table], details={"one worker": {"rates": rates}})


def plain(spec: JobSpec, data_dir: Path, seconds: float, in_channels_last: bool) -> float:
    """Samples per second of a plain loop over a job's batches; after a warm-up."""
    instance = task_of(spec).instance(spec.seed, "train", data_dir)
    module, plan = instance.module.train(), spec.plan
    if in_channels_last:
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), **OPTIMIZER)
    scheduler = CosineAnnealingLR(optimizer, spec.rounds_total * plan.inner_steps)
    numbers = itertools.count()

    def train_for(limit_s: float) -> float:
        """Train for some seconds, at least one step; returns samples per second."""
        began, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() < began + limit_s:
            number = next(numbers)
            images, labels = instance.split.batch(plan.indices(number), plan.sample_seeds(number))
            if in_channels_last:
                images = channels_last(images)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(module(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            steps += 1
        return steps * plan.micro_batch / (time.perf_counter() - began)

    train_for(WARM_UP * seconds)
    return train_for(seconds)


if __name__ == "__main__":
    main()
