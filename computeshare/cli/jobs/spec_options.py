"""A JobSpec's document from the command line: a file, flags over it, `--set` over those. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec, fields_beside
from computeshare.terminal.command import validation_errors

Document = dict[str, Any]


def build(document: Document, flags: Mapping[str, Any], settings: Sequence[str]) -> Document:
    """The JobSpec's document that the parts make together.

    Args:
        document: of `--spec`; left untouched.
        flags: dotted field to value; None for a flag not given.
        settings: `FIELD=VALUE` each, from `--set`.
    An optimizer that is named anew starts from its own defaults; without a name, its arguments change those of the
    document's optimizer, or else of the default one.
    Raises: SpecError.
    """
    built: Document = json.loads(json.dumps(document))
    changes = [(path, value) for path, value in flags.items() if value is not None]
    changes += [parse_setting(text) for text in settings]
    paths = [path for path, _ in changes]
    if "optimizer.name" in paths:
        built.pop("optimizer", None)
    elif "optimizer" not in built and "optimizer" not in paths and any(p.startswith("optimizer.") for p in paths):
        built["optimizer"] = JobSpec.model_fields["optimizer"].get_default(call_default_factory=True).model_dump()
    for path, value in changes:
        put(built, path, value)
    return built


def check(document: Document) -> JobSpec:
    """The document as a JobSpec. Raises SpecError, a line for each field that is wrong."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        lines = []
        for field, message in validation_errors(error):
            unknown = message == "Extra inputs are not permitted"
            told = f"unknown field; allowed: {', '.join(fields_beside(field.split('.')))}" if unknown else message
            lines.append(f"{field}: {told}" if field else told)
        raise SpecError("\n".join(lines)) from error


def parse(text: str, source: str) -> Document:
    """The JSON object in `text`. Raises SpecError, which names the source."""
    try:
        document = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise SpecError(f"{source} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise SpecError(
            f'{source} must hold a JSON object, a JobSpec such as {{"dataset": "mnist", "model": "lenet5"}}'
        )
    return document


def parse_setting(text: str) -> tuple[str, Any]:
    """Field and value of `FIELD=VALUE`; what is no JSON is taken as it stands. Raises SpecError."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecError(f"--set {text}: give FIELD=VALUE, for example optimizer.weight_decay=0.0005")
    try:
        return path, json.loads(value, parse_constant=_refuse)
    except ValueError:
        return path, value


def put(document: Document, path: str, value: object) -> None:
    """Set a dotted field, making the objects on the way. Raises SpecError where one of them is something else."""
    *parents, name = path.split(".")
    for depth, parent in enumerate(parents):
        document = document.setdefault(parent, {})
        if not isinstance(document, dict):
            raise SpecError(f"{path}: {'.'.join(parents[: depth + 1])} is not an object")
    document[name] = value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")
