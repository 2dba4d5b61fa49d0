"""The JobSpecs of stored jobs, each parsed once: the dispatcher looks at all of them every turn."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from sqlalchemy import Dialect, Text, TypeDecorator

from computeshare.jobspec.part import plain_errors
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.hugging_face import HubArgs, HubFacts
from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.jobspec.tasks.own_data import DatasetFacts
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts
from computeshare.strategies.registry import stored


def spec_of(document: Mapping[str, Any]) -> JobSpec:
    """The JobSpec of a stored document. Raises ValidationError: this release cannot read it (it is an older job's)."""
    return _parsed(to_json(document).decode())


class StoredSpec(TypeDecorator[JobSpec | str]):
    """The column of a job's specification, read as a JobSpec, or as the text why this release cannot read it."""

    impl = Text
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> JobSpec | str | None:
        return None if value is None else _read(value)


def readable(document: Mapping[str, Any]) -> JobSpec | str:
    """The JobSpec of a stored document; if this release cannot read it: why, and the remedy."""
    return _read(to_json(document).decode())


def _read(text: str) -> JobSpec | str:
    try:
        return _parsed(text)
    except ValidationError as error:
        first = plain_errors(error.errors(include_url=False))[0]
        place = ".".join(map(str, first["loc"])) or "it"
        return (
            f"This release cannot read the job's specification ({place}: {first['msg']}). Cancel the job and create it "
            "again, or go back to the release that created it"
        )


def plan_of(document: Mapping[str, Any]) -> Plan:
    """The division of a stored job's samples, even where this release refuses its specification."""
    args = document.get("model_args")
    parts: dict[str, Any] = {
        "strategy": stored(document),
        "model_args": GptArgs.model_construct(**args) if args else None,
    }
    if found := (document.get("dataset_args") or {}).get("facts"):
        parts["dataset_args"] = HubArgs.model_construct(facts=HubFacts.model_construct(**found))
    if data := document.get("data"):
        parts["data"] = DatasetFacts.model_construct(**data)
    if facts := document.get("recipe_facts"):
        parts["recipe_facts"] = RecipeFacts.model_construct(**facts)
    return JobSpec.model_construct(**{**document, **parts}).plan


def scored_part(document: Mapping[str, Any]) -> str:
    """The part of the data that a stored job's versions are scored on: `validation` or `test`."""
    return JobSpec.model_construct(**document).scored_part


@lru_cache(maxsize=4096)
def _parsed(text: str) -> JobSpec:
    return JobSpec.model_validate_json(text)
