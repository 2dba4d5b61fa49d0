"""Builds a JobSpec's JSON document from the command line: a file, overridden by flags, overridden by `--set`. Pure.

The flags follow from the JobSpec's fields.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn

import typer
import yaml
from pydantic import ValidationError

from computeshare.cli.connection import queues
from computeshare.errors import SpecError
from computeshare.jobspec.documents.fields import JobField, job_fields, listed
from computeshare.jobspec.machine_needs import parse_need
from computeshare.jobspec.spec import JobSpec, fields_beside
from computeshare.strategies.registry import implied_by
from computeshare.terminal.command import validation_errors

Document = dict[str, Any]
_PYTHON = {"integer": int, "number": float, "needs": list[str]}


def with_job_fields(command: Callable[..., None], fields: Sequence[JobField] | None = None) -> Callable[..., None]:
    """Wrap a command whose first parameter is a mapping of flags: the wrapper has an option for each field of a job.

    Typer reads options from a function's signature, so the signature is built from the fields.
    """
    options = {one.path.replace(".", "__"): one for one in fields or job_fields() if one.flag}

    def told(**given: Any) -> None:
        flags = [_parsed(one, given.pop(name)) for name, one in options.items()]
        command({path: value for parsed in flags for path, value in parsed.items()}, **given)

    kind = inspect.Parameter.KEYWORD_ONLY
    _, *others = inspect.signature(command, eval_str=True).parameters.values()
    made = [inspect.Parameter(n, kind, default=None, annotation=_option(one)) for n, one in options.items()]
    parameters = [*made, *(other.replace(kind=kind) for other in others)]
    told.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    told.__annotations__ = {one.name: one.annotation for one in parameters}
    told.__name__, told.__doc__ = command.__name__, command.__doc__
    return told


def with_editable_fields(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_job_fields`, for the fields that may be changed later."""
    return with_job_fields(command, [one for one in job_fields() if one.control and one.control.change])


def _option(one: JobField) -> Any:
    """The annotation by which Typer offers a field as an option."""
    repeatable = " May be repeated." if one.type == "needs" else ""
    about = f" ({one.description})" if one.description else ""
    default = f", default {one.default}" if one.default not in (None, "") else ""
    complete = queues if one.path == "queue" else (lambda: sorted(one.choices)) if one.choices else None
    option = typer.Option(
        one.flag,
        help=f"{one.title}{about}{default}.{repeatable}",
        metavar="NAME=VALUE" if repeatable else None,
        show_default=False,
        rich_help_panel="The job",
        autocompletion=complete,
    )
    kind: Any = _PYTHON.get(one.type, str)
    return Annotated[kind | None, option]


def _parsed(one: JobField, value: Any) -> dict[str, Any]:
    """A flag's dotted fields and their values; a list is given as `crop,flip`, needs as `memory=8GB` each.

    Raises: SpecError.
    """
    if one.type != "needs":
        return {one.path: listed(value) if one.type == "list" and value is not None else value}
    try:
        return {f"{one.path}.{path}": need for path, need in map(parse_need, value or ())}
    except ValueError as error:
        raise SpecError(f"{one.flag} {error}") from error


def build(document: Document, flags: Mapping[str, Any], settings: Sequence[str]) -> Document:
    """Merge the parts into a JobSpec's document.

    Args:
        document: from `--spec`; left unchanged.
        flags: dotted field to value; None for a flag not given.
        settings: `FIELD=VALUE` each, from `--set`.
    A new `optimizer.name` or `strategy.kind` starts from its own defaults; without one, optimizer arguments change the
    document's optimizer.
    Raises: SpecError.
    """
    built: Document = json.loads(json.dumps(document))
    changes = [(path, value) for path, value in flags.items() if value is not None]
    changes += [parse_setting(text) for text in settings]
    if any(path == "optimizer.name" for path, _ in changes):
        built.pop("optimizer", None)
    kinds = [value for path, value in changes if path == "strategy.kind"]
    if kinds and kinds[-1] != strategy_of(built).get("kind"):  # its fields are another kind's
        built.pop("strategy", None)
    for path, value in changes:
        put(built, path, value)
    return built


def with_batch_size(document: Document, size: int) -> Document:
    """The document with as many samples per micro-batch as make a round of `size` samples; where the strategy sets the
    length of a round by itself, a step of `size` samples.

    Raises: SpecError: the round's micro-batches cannot share the samples equally.
    """
    field = "micro_batches_per_round"
    of_its_own = field in implied_by(strategy_of(document))
    parts = 1 if of_its_own else document.get(field, JobSpec.model_fields[field].default)
    if not isinstance(parts, int) or parts < 1 or size % parts:
        raise SpecError(
            f"--batch-size {size} cannot be shared equally by the {parts} micro-batches of a round: give a multiple of "
            f"{parts}, or another --micro-batches-per-round"
        )
    return {**document, "micro_batch": size // parts}


def strategy_of(document: Document) -> Document:
    """The document's strategy, as far as it has one."""
    found = document.get("strategy")
    return found if isinstance(found, dict) else {}


def check(document: Document) -> JobSpec:
    """Validate the document as a JobSpec. Raises SpecError with a line for each wrong field."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        lines = []
        for field, message in validation_errors(error):
            unknown = message == "Extra inputs are not permitted"
            told = f"unknown field; allowed: {', '.join(fields_beside(field.split('.')))}" if unknown else message
            lines.append(f"{field}: {told}" if field else told)
        if {"dataset: must be given", "model: must be given"} & set(lines):
            lines.append("For example: computeshare jobs create --dataset digits --model mlp")
        raise SpecError("\n".join(lines)) from error


def parse(text: str, source: str) -> Document:
    """Parse the JSON object in `text`; of a source named `.yaml` or `.yml`, YAML with JSON's types. Raises SpecError,
    which names the source.
    """
    form = "YAML" if source.lower().endswith((".yaml", ".yml")) else "JSON"
    try:
        document = yaml.load(text, _Yaml) if form == "YAML" else json.loads(text, parse_constant=_refuse)  # noqa: S506
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{source} is not {form}: {error}") from error
    if not isinstance(document, dict):
        raise SpecError(
            f"{source} must hold an object, not {type(document).__name__}: a JobSpec such as "
            '{"dataset": "mnist", "model": "lenet5"}'
        )
    return document


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML's plain words as JSON does: no dates, and `1e-3` is a number, as in YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _kind, _form, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", "n~"),
    ("int", r"-?(0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", "-0123456789"),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_form})$"), [*_first, ""])


def parse_setting(
    text: str, option: str = "--set", form: str = "FIELD=VALUE, for example optimizer.weight_decay=0.0005"
) -> tuple[str, Any]:
    """Parse `FIELD=VALUE`; a value that is not JSON is taken as text. Raises SpecError, which names the option."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecError(f"{option} {text}: give {form}")
    try:
        return path, json.loads(value, parse_constant=_refuse)
    except ValueError:
        return path, value


def put(document: Document, path: str, value: object) -> None:
    """Set a dotted field, creating the objects on its path. Raises SpecError if the path leads through another type."""
    *parents, name = path.split(".")
    for depth, parent in enumerate(parents):
        document = document.setdefault(parent, {})
        if not isinstance(document, dict):
            raise SpecError(f"{path}: {'.'.join(parents[: depth + 1])} is not an object")
    document[name] = value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")
