"""A job's recipe in the broker: its files beside the JobSpec, and the control plane's signature over what is to be run.

The broker's password is on many machines. Whoever has it can write what they like into a job, but no code runs that the
control plane has not signed, whose token is on its own machine alone.
"""

import hashlib
import hmac
import json
from typing import Any

from redis import Redis

from computeshare.bundles.manifest import DIGEST
from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.protocol.keys import JobKeys
from computeshare.settings import derive
from computeshare.tasks.recipes import packages
from computeshare.tasks.recipes.bundle import MOST_BYTES, Bundle, of_package


def publish(redis: Redis, job_id: str, spec: JobSpec, recipe: Bundle, token: str) -> None:
    """Store a job's recipe, and its signature under the control plane's token. Raises RedisError."""
    keys = JobKeys(job_id)
    redis.mset({keys.recipe(): recipe.content, keys.recipe_signature(): signature(job_id, spec, token)})


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


def is_signed(redis: Redis, job_id: str, spec: JobSpec, token: str) -> bool:
    """Whether the control plane with this token has published what the JobSpec has run."""
    found: Any = redis.get(JobKeys(job_id).recipe_signature())
    return hmac.compare_digest(bytes(found or b""), signature(job_id, spec, token).encode())


def signature(job_id: str, spec: JobSpec, token: str) -> str:
    """The signature over what a job has run: the recipe, its arguments, and the state from which it begins."""
    facts = spec.recipe_facts
    about = [
        job_id,
        spec.recipe,
        spec.recipe_args,
        facts and facts.initial,
        facts and facts.frozen,
        facts and facts.package,
    ]
    text = json.dumps(about, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hmac.new(derive(token, "recipes").encode(), text.encode(), "sha256").hexdigest()
