"""Write the request that creates a job as JSON, curl, a command line or Python, without fields at their defaults. Pure.

The texts in a document are untrusted: each format quotes them, and invisible characters are escaped.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from computeshare.jobspec.documents.fields import job_fields
from computeshare.jobspec.machine_needs import NEEDS, Needs, need_texts
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.registry import KINDS, implied_by

Document = Mapping[str, Any]
FOUND = "data"
"""A field that the control plane finds anew for each job, by the data set's name."""


def as_json(document: Document) -> str:
    """The JobSpec as indented JSON."""
    return _json(shortened(document), indent=2)


def as_curl(document: Document, url: str) -> str:
    """A curl command that creates the job. The shell must have the token in COMPUTESHARE_TOKEN.

    Args:
        url: the control plane's address.
    """
    address = shlex.quote(url.rstrip("/") + "/v1/jobs")
    return (
        'curl -H "Authorization: Bearer $COMPUTESHARE_TOKEN" \\\n'
        "    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(_json(shortened(document)))} \\\n"
        f"    {address}"
    )


def as_cli(document: Document) -> str:
    """The `computeshare jobs create` command for the job, on one line; it finds a recipe's facts out itself."""
    arguments = ["computeshare", "jobs", "create"]
    for path, value in _settings({name: one for name, one in shortened(document).items() if name != "recipe_facts"}):
        needs = need_texts(value) if path in NEEDS else []
        arguments += [part for need in needs for part in (_flags()[path], need)] or _flag(path, value)
    return shlex.join(arguments)


def as_python(document: Document) -> str:
    """A Python program that creates the job and waits for its end."""
    short = shortened(document)
    if all(name.isidentifier() and not iskeyword(name) for name in short):
        given = "\n" + "".join(f"    {name}={_python(value)},\n" for name, value in short.items())
    else:
        given = _python(short)
    return f"from computeshare import ComputeShare\n\ncs = ComputeShare()\njob = cs.jobs.create({given})\njob.wait()\n"


def shortened(document: Document) -> dict[str, Any]:
    """The document without fields that are null or at their defaults, which may depend on the strategy, and without the
    facts of the user's own data.
    """
    usual = {**_defaults(), **_implied(document.get("strategy"))}
    short: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or name == FOUND or (name in usual and value == usual[name]):
            continue
        short[name] = _short_part(name, value) if isinstance(value, dict) else value
    return short


@lru_cache(maxsize=1)
def _flags() -> dict[str, str]:
    return {one.path: one.flag for one in job_fields() if one.flag}


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    """The default of every optional field of a JobSpec."""
    return JobSpec.model_construct().model_dump(mode="json", exclude={"dataset", "model"})


def _implied(strategy: object) -> dict[str, Any]:
    """The fields that a strategy sets; empty if this release does not know the strategy."""
    found = implied_by(strategy)
    return {name: one.model_dump() if isinstance(one, OptimizerSpec) else one for name, one in found.items()}


def _short_part(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """An object within the document without fields at their defaults. All fields of an optimizer are kept."""
    usual: dict[str, Any] = {}
    if name in ("codec", "workers", "keep"):
        usual = _defaults()[name]
    elif name == "strategy" and (kind := part.get("kind")) in list(KINDS):
        usual = KINDS[str(kind)]().model_dump(mode="json", exclude={"kind"})
    elif name in NEEDS:
        usual = Needs().model_dump()
    elif name == "stop":
        usual = dict.fromkeys(part)
    return {field: value for field, value in part.items() if field not in usual or value != usual[field]}


def _settings(short: Document) -> Iterator[tuple[str, Any]]:
    """The dotted path and value of each field to write on a command line."""
    for name, value in short.items():
        if isinstance(value, dict) and name not in NEEDS and _is_split(name, value):
            yield from ((f"{name}.{field}", one) for field, one in value.items())
        else:
            yield name, value


def _is_split(name: str, value: Document) -> bool:
    """Whether an object can be given field by field; not an optimizer without a name: it would get the default."""
    return bool(value) and all(field.isidentifier() for field in value) and (name != "optimizer" or "name" in value)


def _flag(path: str, value: object) -> list[str]:
    """Command-line arguments for a field: its own flag if the flag accepts the value as it is, otherwise `--set`."""
    if path == "recipe":
        return ["--recipe", str(value)]
    option, path = ("--arg", path.removeprefix(_ARGS)) if path.startswith(_ARGS) else ("--set", path)
    flag = _flags().get(path) if option == "--set" else None
    if flag and isinstance(value, list):  # of names
        value = ",".join(value)
    if flag and isinstance(value, str) and value.isprintable():
        return [flag, value] if not value.startswith("-") else [f"{flag}={value}"]
    if flag and isinstance(value, int | float) and not isinstance(value, bool):
        return [flag, str(value)] if value >= 0 else [f"{flag}={value}"]
    if isinstance(value, str) and value.isprintable() and not _is_json(value):
        return [option, f"{path}={value}"]
    return [option, f"{path}={_json(value)}"]


_ARGS = "recipe_args."


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json(value: object, indent: int | None = None) -> str:
    """JSON, with invisible characters escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if text.replace("\n", "").isprintable() else json.dumps(value, indent=indent)


def _python(value: object) -> str:
    """A JSON value as Python source, with strings in double quotes where possible."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(name)}: {_python(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
