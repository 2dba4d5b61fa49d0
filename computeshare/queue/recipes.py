"""A job's recipe in the broker: its files beside the JobSpec, and the control plane's signature over what is to be run.

Many machines can write into the broker. Whoever does can write what they like into a job, but no code runs that the
control plane has not signed, whose private key is on its own machine alone.
"""

import hashlib
from typing import Any

from redis import Redis

from computeshare.bundles.manifest import DIGEST
from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.protocol.keys import JobKeys
from computeshare.runtime import signatures
from computeshare.runtime.signatures import SIGNATURE_BYTES, SigningKey
from computeshare.tasks.recipes import packages
from computeshare.tasks.recipes.bundle import MOST_BYTES, Bundle, of_package


def publish(redis: Redis, job_id: str, spec: JobSpec, recipe: Bundle, key: SigningKey | None) -> None:
    """Store a job's recipe, and the control plane's signature; without a key, an empty one. Raises RedisError."""
    keys = JobKeys(job_id)
    signature = key.sign("recipe", *_signed(job_id, spec)) if key else ""
    redis.mset({keys.recipe(): recipe.content, keys.recipe_signature(): signature})


def recipe_of(redis: Redis, job_id: str, spec: JobSpec) -> Bundle:
    """The files of a job's recipe.

    Raises: RecipeError: they are missing, or not those that the JobSpec names; or a recipe's package is not installed
        here, or in another version.
    """
    if spec.recipe and spec.recipe.startswith(PACKAGE):
        packages.check(spec.recipe, spec.recipe_facts.package if spec.recipe_facts else "")
        return of_package(spec.recipe)
    content: Any = redis.getrange(JobKeys(job_id).recipe(), 0, MOST_BYTES)
    if not content:
        raise RecipeError("the recipe's files are not in the broker: pause the job and resume it")
    if DIGEST + hashlib.sha256(content).hexdigest() != spec.recipe:
        raise RecipeError("the recipe's files are not those that the job names: they were changed in the broker")
    return Bundle.parse(content)


def is_signed(redis: Redis, job_id: str, spec: JobSpec, control_key: str) -> bool:
    """Whether the control plane with this public key has published what the JobSpec has run."""
    found: Any = redis.getrange(JobKeys(job_id).recipe_signature(), 0, 2 * SIGNATURE_BYTES)
    return signatures.is_signed(control_key, found.decode(errors="replace"), "recipe", *_signed(job_id, spec))


def _signed(job_id: str, spec: JobSpec) -> tuple[Any, ...]:
    """The values that are signed: the job's id, recipe, arguments and package, and the state from which it begins."""
    facts = spec.recipe_facts
    what = (facts.initial, facts.frozen, facts.package) if facts else (None, None, None)
    return job_id, spec.recipe, spec.recipe_args, *what
