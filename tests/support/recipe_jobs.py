"""Specifications of jobs that train a recipe."""

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.modules import frozen_digest, layout_of
from computeshare.tasks.recipes import state_files

RECIPE = "sha256:" + "a1" * 32
FACTS: dict[str, Any] = {
    "train": 100,
    "test": 20,
    "tensors": [
        {"name": "0.weight", "shape": [4, 3], "kind": "parameter"},
        {"name": "0.bias", "shape": [4], "kind": "parameter"},
        {"name": "1.running_mean", "shape": [4], "kind": "buffer"},
        {"name": "1.num_batches_tracked", "shape": [], "kind": "counter"},
    ],
    "metric": "loss",
    "metrics": ["error"],
    "initial": "sha256:" + "b2" * 32,
}
"""Of a small model that has something of every kind."""


def recipe_spec(**changes: Any) -> JobSpec:
    """A job's specification with a recipe and its facts."""
    return JobSpec.model_validate({"recipe": RECIPE, "recipe_facts": FACTS, **changes})


def stored_facts(module: nn.Module, store: BundleStore, **changes: Any) -> dict[str, Any]:
    """The facts of a recipe that builds the module, whose initial state is put into the store."""
    with tempfile.TemporaryDirectory() as folder:
        state_files.write(module, Path(folder))
        initial = store.add(Path(folder)).digest
    tensors = [{"name": t.name, "shape": t.shape, "kind": t.kind} for t in layout_of(module).tensors]
    return {**FACTS, "tensors": tensors, "initial": initial, "frozen": frozen_digest(module), **changes}
