"""A job's recipe in the broker: what is read is what was named, and what was signed."""

from collections.abc import Callable

import pytest
from redis import Redis

from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.queue import recipes
from computeshare.runtime.signatures import SigningKey
from computeshare.tasks.recipes.bundle import Bundle
from tests.support.recipe_jobs import FACTS, recipe_spec

KEY = SigningKey.new()
RECIPE = Bundle({"recipe.py": "def model(): ...\n", "parts/layers.py": "ä = 1\n"})


@pytest.fixture
def spec(redis: Redis, job_id: str) -> JobSpec:
    spec = recipe_spec(recipe=RECIPE.digest, recipe_args={"width": 8})
    recipes.publish(redis, job_id, spec, RECIPE, KEY)
    return spec


def test_what_was_published_is_read_and_signed(redis: Redis, job_id: str, spec: JobSpec) -> None:
    assert recipes.recipe_of(redis, job_id, spec) == RECIPE
    assert recipes.is_signed(redis, job_id, JobSpec.model_validate_json(spec.model_dump_json()), KEY.public)
    assert not recipes.is_signed(redis, job_id, spec, SigningKey.new().public)


CHANGES: list[Callable[[dict[str, object]], object]] = [
    lambda fields: fields.update(recipe=Bundle({"recipe.py": "import os"}).digest),
    lambda fields: fields.update(recipe_args={"width": 9}),
    lambda fields: fields.update(recipe_args=None),
    lambda fields: fields.update(recipe_facts={**FACTS, "initial": "sha256:" + "c" * 64}),
    lambda fields: fields.update(recipe_facts={**FACTS, "frozen": "d" * 64}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_specification_is_not_signed(
    redis: Redis, job_id: str, spec: JobSpec, change: Callable[[dict[str, object]], object]
) -> None:
    fields = spec.model_dump(mode="json")
    change(fields)
    assert not recipes.is_signed(redis, job_id, JobSpec.model_validate(fields), KEY.public)


def test_the_signature_of_one_job_is_not_anothers(redis: Redis, job_id: str, spec: JobSpec) -> None:
    signature = redis.get(JobKeys(job_id).recipe_signature())
    other = JobKeys(f"{job_id}1")
    redis.set(other.recipe_signature(), signature or b"")  # type: ignore[arg-type]
    assert not recipes.is_signed(redis, other.job_id, spec, KEY.public)
    redis.set(other.recipe_signature(), SigningKey.new().sign("recipe", other.job_id))
    assert not recipes.is_signed(redis, other.job_id, spec, KEY.public)
    redis.set(other.recipe_signature(), b"\xff" * 1_000_000)
    assert not recipes.is_signed(redis, other.job_id, spec, KEY.public)
    redis.delete(other.recipe_signature())
    assert not recipes.is_signed(redis, other.job_id, spec, KEY.public)


def test_other_files_are_refused(redis: Redis, job_id: str, spec: JobSpec) -> None:
    for content in (Bundle({"recipe.py": "import os"}).content, RECIPE.content + b" ", b"{}", b"x" * 2_000_000):
        redis.set(JobKeys(job_id).recipe(), content)
        with pytest.raises(RecipeError, match="not those that the job names"):
            recipes.recipe_of(redis, job_id, spec)
    redis.delete(JobKeys(job_id).recipe())
    with pytest.raises(RecipeError, match="not in the broker"):
        recipes.recipe_of(redis, job_id, spec)
