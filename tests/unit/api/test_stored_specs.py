"""The plan of a stored job is its specification's, and is there even if the specification is refused by now."""

from typing import Any

import pytest

from api.stored_specs import plan_of
from computeshare.jobspec.spec import JobSpec
from tests.support.recipe_jobs import FACTS as FACTS_OF_RECIPE
from tests.support.recipe_jobs import RECIPE

GPT = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": {"block_size": 32}}
LOCAL = {"kind": "local", "inner_steps": 3, "replicas": 2}


FACTS = {"revision": "5" * 40, "train": 777, "test": 70, "shape": [3, 32, 32], "classes": ["cat", "dog"]}
HUB = {"dataset": "hf:lab/pets", "dataset_args": {"facts": FACTS}}


RECIPE_JOB = {"dataset": None, "model": None, "recipe": RECIPE, "recipe_facts": FACTS_OF_RECIPE}


@pytest.mark.parametrize("changes", [{}, {"strategy": LOCAL}, {"micro_batch": 7, "seed": 5}, GPT, HUB, RECIPE_JOB])
def test_the_plan_of_a_stored_job_is_that_of_its_specification(changes: dict[str, Any]) -> None:
    spec = JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", **changes})
    document = spec.model_dump(mode="json")
    assert plan_of(document) == spec.plan == plan_of({**document, "model": "gone", "micro_batch_size": 3})
