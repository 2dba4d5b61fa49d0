"""Units per second of a seat whose model is in its own process, and of one that asks a recipe's confined process.

    python -m bench.recipe_process [--models simplenet resnet18] [--seconds 5] [--pairs 3] [--json FILE]

The same recipe, batches of 32, gradients given away bucket by bucket and copied, as a seat encodes them. Both are timed
in turns, and medians of the pairs are printed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts, TensorEntry
from computeshare.tasks.modules import weights_of
from computeshare.tasks.recipes import state_files
from computeshare.tasks.recipes.bundle import MAIN, Bundle
from computeshare.tasks.recipes.functions import load
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.tensors.layout import Weights
from computeshare.training.computation import LocalComputation, choose_device
from computeshare.training.recipe_process.process import RecipeFiles, RecipeProcess
from computeshare.training.work_units import AnyReplica
from computeshare.types import Vector

RECIPE = """
import torch
from computeshare.tasks.images.models import build

class Noise:
    def __init__(self, shape):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(512, *shape, generator=drawn)
        self.targets = torch.randint(0, 10, (512,), generator=drawn)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

def model(name, shape):
    return build(name, tuple(shape), 10, 0)

def data(split, folder, shape):
    return Noise(shape)
"""
SHAPES = {"simplenet": [1, 28, 28], "resnet18": [3, 32, 32]}


def job(name: str, threads: int, folder: Path) -> tuple[JobSpec, RecipeFiles, RecipeTask]:
    """A job that trains a model as a recipe."""
    bundle, arguments = Bundle({MAIN: RECIPE}), {"name": name, "shape": SHAPES[name]}
    bundle.write(folder)
    task = RecipeTask(load(folder), bundle.digest, arguments)
    module = task.module(0)
    (folder / "state").mkdir()
    state_files.write(module, folder / "state")
    tensors = tuple(TensorEntry(name=t.name, shape=t.shape, kind=t.kind) for t in task.layout().tensors)
    facts = RecipeFacts(train=512, test=512, tensors=tensors, metric="accuracy", initial="sha256:" + "0" * 64)
    fields = {"recipe": bundle.digest, "recipe_args": arguments, "recipe_facts": facts, "threads": threads}
    return JobSpec.model_validate(fields), RecipeFiles(bundle, folder / "state"), task


def units_per_s(replica: AnyReplica, weights: Weights, seconds: float) -> float:
    """Units computed per second, each on newly loaded weights."""
    room, update, units = replica.room, np.empty_like(weights.parameters), 0
    starts = 0

    def take(bucket: int, values: Vector) -> None:
        nonlocal starts
        np.copyto(update[starts : starts + len(values)], values)
        starts += len(values)

    began = time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        starts = 0
        if room is not None:
            np.copyto(room, weights.parameters)
        replica.load(weights if room is None else Weights(room, weights.buffers, weights.counters))
        replica.compute(units % 16, take=take)
        units += 1
    return units / took


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Units per second here and in the recipe's process: medians of the pairs, and their ratio's."""
    with tempfile.TemporaryDirectory() as folder:
        spec, files, task = job(name, options.threads, Path(folder))
        device = choose_device(spec, options.device)
        here = LocalComputation(task.instance(0, "train", Path()), device)
        weights = weights_of(here.instance.module, here.layout)
        process = RecipeProcess(spec, files, options.device)
        try:
            replicas = here.replica(spec), process.open().replica(spec)
            for replica in replicas:
                units_per_s(replica, weights, 1.0)
            pairs = [[units_per_s(one, weights, options.seconds) for one in replicas] for _ in range(options.pairs)]
        finally:
            process.close()
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"here": mine, "in its process": theirs, "ratio": statistics.median(b / a for a, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name in options.models:
        found[name] = measure(name, options)
        print(name, *(f"{label} {value:.3g}" for label, value in found[name].items()), sep="; ", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
