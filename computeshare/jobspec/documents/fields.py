"""The fields of a job, derived from the JobSpec, for the form, the command line, edits and docs/job.md. Pure.

`python -m computeshare.jobspec.documents.fields` prints the reference, docs/job.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.controls import Control
from computeshare.jobspec.machine_needs import Needs
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs
from computeshare.strategies.base import Strategy
from computeshare.strategies.registry import KINDS

FieldType = Literal["integer", "number", "boolean", "text", "list", "needs", "object"]
_TYPES: dict[Any, FieldType] = {int: "integer", float: "number", bool: "boolean", str: "text", Needs: "needs"}


@dataclass(frozen=True, slots=True)
class JobField:
    """A field: its dotted `path`, the strategies that have it (`kinds`; empty: all), its range (`1 to 1,024`)."""

    path: str
    title: str
    description: str
    type: FieldType
    default: Any
    choices: Sequence[str]
    limits: str
    kinds: Sequence[str]
    control: Control | None

    @property
    def flag(self) -> str:
        """The field's option of `computeshare jobs create`; empty if there is none."""
        if self.control is None or self.control.flag is None:
            return ""
        return self.control.flag or "--" + self.path.replace(".", "-").replace("_", "-")


@lru_cache(maxsize=1)
def job_fields() -> Sequence[JobField]:
    """All fields, in the order of the JobSpec, each strategy's after `strategy.kind`."""
    defaults = JobSpec.model_construct().model_dump(mode="json")
    return tuple(_of(JobSpec, defaults))


def editable(*when: Literal["active", "always"]) -> dict[str, FieldInfo]:
    """The top-level fields whose `change` is one of `when`: `always`, or `active` (until the job ends)."""
    found = {name: (info, control_of(info)) for name, info in JobSpec.model_fields.items()}
    return {name: info for name, (info, control) in found.items() if control and control.change in when}


def control_of(info: FieldInfo) -> Control | None:
    """The control beside a field, if it has one."""
    return next((one for one in info.metadata if isinstance(one, Control)), None)


def listed(text: str) -> list[str]:
    """The values of a list of names as people write it: `crop, flip`."""
    return [name for part in text.split(",") if (name := part.strip())]


def reference() -> str:
    """The text of docs/job.md: a table of every field."""
    rows = [f"| `{one.path}` | {_told_type(one)} | {_told_default(one)} | {_told(one)} |" for one in job_fields()]
    return "\n".join([_HEAD, "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _of(model: type[BaseModel], defaults: Any, above: str = "", kinds: Sequence[str] = ()) -> Iterator[JobField]:
    for name, info in model.model_fields.items():
        path, default = f"{above}{name}", defaults.get(name)
        serving = kinds or _kinds_with(path)
        if name == "strategy":
            told = "; ".join(f"{kind}: {part.suits}" for kind, part in KINDS.items())
            for shared, its in Strategy.model_fields.items():
                found = _field(f"strategy.{shared}", its, default[shared], ())
                yield replace(found, description=told, choices=tuple(KINDS)) if shared == "kind" else found
            for kind, part in KINDS.items():
                yield from _of(part, part().model_dump(mode="json"), "strategy.", (kind,))
        elif above == "strategy." and name in Strategy.model_fields:
            continue
        elif inner := _inner(info.annotation):
            if control_of(info):
                yield _field(path, info, None, serving)
            usual = default or (inner.model_construct().model_dump() if inner is GptArgs else {})
            yield from _of(inner, usual, f"{path}.", serving)
            if inner is OptimizerSpec:
                for argument, about in OptimizerSpec.COMMON.items():
                    common = FieldInfo.from_annotation(about)
                    yield _field(f"{path}.{argument}", common, default.get(argument), serving)
        else:
            yield _field(path, info, default, serving)


def _field(path: str, info: FieldInfo, default: Any, kinds: Sequence[str]) -> JobField:
    choices = _choices(path, info.annotation)
    title, control = info.title or path, control_of(info)
    parts = path.split(".")
    if len(parts) > 2:  # the fields of `optimizer` once more, for a strategy's own, and without their options
        title = f"{parts[-2].removesuffix('_optimizer').capitalize()} {title.lower()}".removesuffix(" name")
        control = Control(control.heading, None) if control else None
    return JobField(
        path, title, info.description or "", _type(info.annotation), default, choices, _limits(info), kinds, control
    )


def _kinds_with(path: str) -> Sequence[str]:
    """The strategies that leave this field to the user; empty: all strategies."""
    found = tuple(kind for kind, part in KINDS.items() if path not in part().implied)
    return () if len(found) == len(KINDS) else found


def _arms(annotation: Any) -> Sequence[Any]:
    """The types of a union without None, or the one type."""
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    if get_origin(annotation) is Literal or not get_args(annotation) or get_origin(annotation) in (tuple, list, dict):
        return (annotation,)
    return tuple(one for one in get_args(annotation) if one is not type(None))


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model of a field's value, if it has one."""
    return next((one for one in _arms(annotation) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _type(annotation: Any) -> FieldType:
    first = _arms(annotation)[0]
    if get_origin(first) is tuple:
        return "list"
    return "text" if get_origin(first) is Literal else _TYPES.get(first, "object")


def _choices(path: str, annotation: Any) -> Sequence[str]:
    known = catalog()
    if path == "dataset":
        return sorted([*known.datasets, *known.texts])
    if path == "model":
        return sorted([*known.models, *LANGUAGE_MODELS], key=lambda name: (_is_torchvisions(name), name))
    if path.endswith("optimizer.name"):
        return sorted(known.optimizers)
    return [value for one in _arms(annotation) if get_origin(one) is Literal for value in get_args(one)]


def _is_torchvisions(model: str) -> bool:
    return model in catalog().models and catalog().models[model].source == "torchvision"


def _limits(info: FieldInfo) -> str:
    """A field's allowed range or length as text, such as `1 to 1,024`."""
    metadata = list(info.metadata)
    lowest = next((one.ge for one in metadata if isinstance(one, Ge)), None)
    highest = next((one.le for one in metadata if isinstance(one, Le)), None)
    if lowest is not None and highest is not None:
        return f"{lowest:,} to {highest:,}"
    signs = {Gt: ("above", "gt"), Ge: ("at least", "ge"), Le: ("at most", "le"), Lt: ("below", "lt")}
    told = [f"{signs[type(one)][0]} {getattr(one, signs[type(one)][1]):,}" for one in metadata if type(one) in signs]
    counted = "values" if get_origin(info.annotation) in (tuple, dict) else "characters"
    length = [f"at most {one.max_length} {counted}" for one in metadata if hasattr(one, "max_length")]
    return ", ".join(told + length)


_HEAD = """# The fields of a job

A job is a JobSpec: JSON for [`POST /v1/jobs`](rest.md), keyword arguments for [Python](python.md), options of
`computeshare jobs create`. Only `dataset` and `model` are needed, or a [`recipe`](recipes.md) in place of both; a field
that does not exist is an error. This page is made from the JobSpec by
`python -m computeshare.jobspec.documents.fields`.
"""


def _told_type(one: JobField) -> str:
    if one.choices and len(one.choices) < 12:
        return ", ".join(f"`{choice}`" for choice in one.choices)
    name = "object" if one.type == "needs" else one.type
    return f"{name}, {one.limits}" if one.limits else name


def _told_default(one: JobField) -> str:
    return (
        ""
        if one.default in (None, "", {})
        else f"`{str(one.default).lower() if one.type == 'boolean' else one.default}`"
    )


def _told(one: JobField) -> str:
    text = ": ".join(part for part in (one.title if one.title != one.path else "", one.description) if part)
    kinds = f" (strategy {', '.join(one.kinds)})" if one.kinds else ""
    return text + kinds + (f"; `{one.flag}`" if one.flag else "")


if __name__ == "__main__":
    print(reference(), end="")
