"""The facts of a job's data set, found out when the job is created."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from sqlalchemy.orm import Session

from api.errors import InvalidFields
from computeshare.errors import DatasetError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.own_data import DatasetFacts, is_own_name
from computeshare.tasks.images.datasets import hugging_face


class OwnDatasets(Protocol):
    """The data sets that users added."""

    def facts(self, name: str) -> DatasetFacts | None: ...

    def names(self) -> Sequence[str]: ...

    def has_files(self, bundle: str) -> bool: ...

    def free(self, session: Session, bundles: Iterable[str]) -> None: ...


class NoOwnDatasets:
    """The data sets of a control plane that keeps none."""

    def facts(self, name: str) -> DatasetFacts | None:
        return None

    def names(self) -> Sequence[str]:
        return ()

    def has_files(self, bundle: str) -> bool:
        return False

    def free(self, session: Session, bundles: Iterable[str]) -> None:
        del session, bundles


def completed(spec: JobSpec, data_dir: Path, own: OwnDatasets) -> JobSpec:
    """The specification with the facts of its data set, found among the users' `own`, in `data_dir` or on the Hub, and
    checked with them.

    Raises: InvalidFields: the data set cannot be found or used, or the job cannot be trained on it.
    """
    spec = with_own_data(spec, own)
    if spec.dataset is None or spec.dataset_args is None or not spec.task.needs_facts:
        return spec
    try:
        args = hugging_face.completed(spec.dataset, spec.dataset_args, data_dir)
    except DatasetError as error:
        told = str(error)
        raise InvalidFields.at(told if spec.dataset in told else f"{spec.dataset}: {told}", "dataset") from error
    return _with(spec, "dataset_args", args.model_dump(mode="json"))


def with_own_data(spec: JobSpec, own: OwnDatasets) -> JobSpec:
    """The specification with the facts of the user's own data set, if it names one. Raises InvalidFields."""
    name = spec.dataset
    if name is None or not is_own_name(name):
        return spec
    facts = spec.data or own.facts(name)
    if facts is None:
        known = catalog()
        allowed = ", ".join(sorted({*known.datasets, *known.texts}))
        yours = ", ".join(own.names()) or "none, `computeshare data add` adds one"
        raise InvalidFields.at(f"unknown dataset {name!r}; allowed: {allowed}; your own: {yours}", "dataset")
    if not own.has_files(facts.bundle):
        message = f"the files of {name} are not here any more: add it again by `computeshare data add {name} PATH`"
        raise InvalidFields.at(message, "dataset")
    return spec if spec.data else _with(spec, "data", facts.model_dump(mode="json"))


def _with(spec: JobSpec, field: str, value: Any) -> JobSpec:
    document = spec.model_dump(mode="json", exclude=set(spec.strategy.implied))
    try:
        return JobSpec.model_validate(document | {field: value})
    except ValidationError as error:
        raise InvalidFields.of(error) from error
