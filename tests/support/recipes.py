"""Recipes to train in tests, as jobs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts, TensorEntry
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.recipes import state_files
from computeshare.tasks.recipes.bundle import MAIN, Bundle
from computeshare.tasks.recipes.functions import load
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.training.recipe_process.process import RecipeFiles

NOISE = """
import torch
from torch import nn

class Noise:
    def __init__(self, split, samples):
        drawn = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn(samples, 1, 12, 12, generator=drawn)
        self.targets = torch.randint(0, 10, (samples,), generator=drawn)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(1, 12, 12), self.targets[index]

def data(split, folder, samples=100):
    return Noise(split, samples)
"""
"""Data of a recipe's, with augmentation from torch's generator."""
CONVOLUTIONS = (
    NOISE
    + """
def model(maps=8):
    features = nn.Sequential(nn.Conv2d(1, maps, 3), nn.BatchNorm2d(maps), nn.Dropout2d(), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(25 * maps, 10))
"""
)
"""A model with everything that could carry something over: batch normalisation and dropout."""


@dataclass(frozen=True)
class RecipeJob:
    """A job that trains a recipe, with what its processes read."""

    spec: JobSpec
    files: RecipeFiles
    task: RecipeTask
    """The same in this process."""


def recipe_job(text: str, folder: Path, **fields: Any) -> RecipeJob:
    """A job for the recipe `text`, whose files are written below `folder`; runs the recipe in this process."""
    bundle, arguments = Bundle({MAIN: text}), fields.get("recipe_args", {})
    bundle.write(folder / "recipe")
    task = RecipeTask(load(folder / "recipe"), bundle.digest, arguments)
    module = task.module(fields.get("seed", 0))
    state = folder / "state"
    state.mkdir()
    state_files.write(module, state)
    train, test = (task.open(split, folder) for split in ("train", "test"))
    batch = test.batch(np.arange(min(8, len(test))))
    facts = RecipeFacts(
        train=len(train),
        test=len(test),
        tensors=tuple(TensorEntry(name=t.name, shape=t.shape, kind=t.kind) for t in task.layout().tensors),
        **task.found_scores(module, batch)._asdict(),
        initial="sha256:" + "0" * 64,
        frozen=frozen_digest(module),
    )
    spec = JobSpec.model_validate({"recipe": bundle.digest, "recipe_facts": facts, **fields})
    classes, validation = facts.classes, spec.validation
    task = RecipeTask(
        task.functions, bundle.digest, arguments, None, state, facts.metrics, classes, spec.label_smoothing, validation
    )
    return RecipeJob(spec, RecipeFiles(bundle, state), task)
