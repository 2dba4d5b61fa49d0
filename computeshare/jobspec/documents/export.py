"""A job as something to copy: the shortest document that asks for it, as JSON, curl, a command line, Python. Pure.

What a document holds may come from anybody: it is quoted for whatever reads it, and what cannot be seen is escaped.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from computeshare.jobspec.documents.fields import job_fields
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.registry import KINDS, implied_by

Document = Mapping[str, Any]


def as_json(document: Document) -> str:
    """The JobSpec as JSON, an indented line a field."""
    return _json(shortened(document), indent=2)


def as_curl(document: Document, url: str) -> str:
    """The request that creates the job, for a shell that has the token in COMPUTESHARE_TOKEN.

    Args:
        url: of the control plane.
    """
    address = shlex.quote(url.rstrip("/") + "/v1/jobs")
    return (
        'curl -H "Authorization: Bearer $COMPUTESHARE_TOKEN" \\\n'
        "    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(_json(shortened(document)))} \\\n"
        f"    {address}"
    )


def as_cli(document: Document) -> str:
    """The command that creates the job, on one line."""
    arguments = ["computeshare", "jobs", "create"]
    for path, value in _settings(shortened(document)):
        arguments += _flag(path, value)
    return shlex.join(arguments)


def as_python(document: Document) -> str:
    """A program that creates the job and waits for it."""
    short = shortened(document)
    if all(name.isidentifier() and not iskeyword(name) for name in short):
        given = "\n" + "".join(f"    {name}={_python(value)},\n" for name, value in short.items())
    else:
        given = _python(short)
    return f"from computeshare import ComputeShare\n\ncs = ComputeShare()\njob = cs.jobs.create({given})\njob.wait()\n"


def shortened(document: Document) -> dict[str, Any]:
    """The document without what it need not say: fields that are null, or as they would be anyway."""
    usual = {**_defaults(), **_implied(document.get("strategy"))}
    short: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or (name in usual and value == usual[name]):
            continue
        short[name] = _short_part(name, value) if isinstance(value, dict) else value
    return short


@lru_cache(maxsize=1)
def _flags() -> dict[str, str]:
    return {one.path: one.flag for one in job_fields() if one.flag}


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    """Every field that a JobSpec can do without, and what it then is."""
    return JobSpec.model_construct(dataset="", model="").model_dump(mode="json", exclude={"dataset", "model"})


def _implied(strategy: object) -> dict[str, Any]:
    """What follows from a strategy; nothing where it is none that this release knows."""
    found = implied_by(strategy)
    return {name: one.model_dump() if isinstance(one, OptimizerSpec) else one for name, one in found.items()}


def _short_part(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """An object of the document without the fields that it would have anyway: those of an optimizer are all kept."""
    usual: dict[str, Any] = {}
    if name in ("codec", "workers", "keep"):
        usual = _defaults()[name]
    elif name == "strategy" and (kind := part.get("kind")) in list(KINDS):
        usual = KINDS[str(kind)]().model_dump(mode="json", exclude={"kind"})
    return {field: value for field, value in part.items() if field not in usual or value != usual[field]}


def _settings(short: Document) -> Iterator[tuple[str, Any]]:
    """Dotted field and value of all that a command line has to say."""
    for name, value in short.items():
        if isinstance(value, dict) and _is_told_by_fields(name, value):
            yield from ((f"{name}.{field}", one) for field, one in value.items())
        else:
            yield name, value


def _is_told_by_fields(name: str, value: Document) -> bool:
    """Whether an object can be given field by field; those of an optimizer without a name would be the default's."""
    return bool(value) and all(field.isidentifier() for field in value) and (name != "optimizer" or "name" in value)


def _flag(path: str, value: object) -> list[str]:
    """A field as arguments: by its own flag where that takes it as it is, else by `--set`."""
    flag = _flags().get(path)
    if flag and isinstance(value, str) and value.isprintable():
        return [flag, value] if not value.startswith("-") else [f"{flag}={value}"]
    if flag and isinstance(value, int | float) and not isinstance(value, bool):
        return [flag, str(value)] if value >= 0 else [f"{flag}={value}"]
    if isinstance(value, str) and value.isprintable() and not _is_json(value):
        return ["--set", f"{path}={value}"]
    return ["--set", f"{path}={_json(value)}"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json(value: object, indent: int | None = None) -> str:
    """JSON in which whatever cannot be seen is escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if text.replace("\n", "").isprintable() else json.dumps(value, indent=indent)


def _python(value: object) -> str:
    """A value of JSON as Python would be written, strings in double quotes where that can be."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(name)}: {_python(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
