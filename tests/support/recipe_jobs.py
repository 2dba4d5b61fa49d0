"""Specifications of jobs that train a recipe."""

from typing import Any

from computeshare.jobspec.spec import JobSpec

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
