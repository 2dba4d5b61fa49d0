"""The form for a new job: its fields, and the conversion between form values and a JobSpec's document. Pure."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from computeshare.jobspec import controls
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.documents.export import shortened
from computeshare.jobspec.documents.fields import JobField, job_fields, listed
from computeshare.jobspec.machine_needs import need_texts, parse_need
from computeshare.jobspec.part import plain_errors
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs
from computeshare.jobspec.tasks.own_data import is_own_name
from computeshare.strategies.registry import DEFAULT, KINDS

Document = dict[str, Any]
STRATEGY, CODEC, MODEL_ARGS, MORE = "strategy.kind", "codec", "model_args", "more"
RECIPE, ARGUMENTS = "recipe", "recipe_args"
CHOSEN = "manual"
"""The form's other value of `codec` beside `auto`: use the two codec fields."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One input of the form: the dotted `path` of its JobSpec field, its label and hint.

    `kinds`: the strategies that have the field; empty: all. `step`: the HTML attribute of a number input, `1` or
    `any`; empty for text. `lines`: the height of a text box. `models`: the models that have the field; empty: all.
    `is_list`: names separated by commas; `is_needs`: needs of a machine, separated likewise.
    """

    path: str
    label: str
    hint: str = ""
    choices: Sequence[str] = ()
    step: str = ""
    kinds: Sequence[str] = ()
    lines: int = 1
    models: Sequence[str] = ()
    is_list: bool = False
    is_needs: bool = False

    @property
    def id(self) -> str:
        return self.path.replace(".", "-").replace("_", "-")


RECIPE_HINT = "your own model, data and loss; computeshare jobs create --recipe PATH adds one"
OTHERS = FormField(
    MORE,
    "Other fields (JSON)",
    'for example {"strategy": {"max_norm": 1.0}, "optimizer": {"weight_decay": 0.0005}}',
    lines=4,
)
"""The last input, for all fields without an input of their own."""
RECIPE_ARGUMENTS = FormField(
    ARGUMENTS, "Recipe's arguments", "NAME=VALUE, each in a line of its own; values are JSON, else text", lines=3
)
"""The input below that of the recipe."""


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs under a heading; `open`: whether they are shown at first."""

    heading: str
    fields: Sequence[FormField]
    open: bool = True


@dataclass(frozen=True, slots=True)
class Filled:
    """A filled-in form: its document, and error messages by field path (empty path: the form as a whole)."""

    values: Mapping[str, str]
    document: Document
    spec: JobSpec | None
    errors: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1)
def groups() -> Sequence[Group]:
    """The form, from top to bottom."""
    return tuple(
        Group(
            heading,
            tuple(
                made
                for one in job_fields()
                if one.control and one.control.heading == heading
                for made in ((_form_field(one), RECIPE_ARGUMENTS) if one.path == RECIPE else (_form_field(one),))
            ),
            open=heading != controls.MORE,
        )
        for heading in controls.HEADINGS
    )


def _form_field(one: JobField) -> FormField:
    assert one.control is not None
    step = {"integer": "1", "number": "any"}.get(one.type, "")
    choices = ("auto", CHOSEN) if one.path == CODEC else one.choices
    if choices and one.default is None:
        choices = ("", *choices)
    hint = RECIPE_HINT if one.path == RECIPE else one.description
    models = LANGUAGE_MODELS if one.path.startswith(f"{MODEL_ARGS}.") else ()
    shown = (one.path, one.title, hint, choices, step, one.kinds, one.control.lines)
    return FormField(*shown, models, one.type == "list", one.type == "needs")


def fields() -> Iterator[FormField]:
    """All inputs of all groups, in order."""
    for group in groups():
        yield from group.fields


def wrong(form: Filled) -> Sequence[FormField]:
    """The inputs with an error, in order."""
    return [one for one in (*fields(), OTHERS) if one.path in form.errors]


def filled(values: Mapping[str, str]) -> Filled:
    """Convert form values to a document and validate it. Empty inputs get their defaults."""
    kind, model = values.get(STRATEGY) or DEFAULT.kind, values.get("model", "").strip()
    document: Document = {}
    errors: dict[str, str] = {}
    for one in fields():
        text = values.get(one.path, "").strip()
        has_field = (not one.kinds or kind in one.kinds) and (not one.models or model in one.models)
        if text and one.path != CODEC and has_field:
            try:
                for path, value in _read(one, text):
                    _put(document, path, value)
            except ValueError as error:
                errors[one.path] = str(error)
    if values.get(CODEC) == "auto":
        document[CODEC] = "auto"
    _tidy(document)
    if recipe := values.get(RECIPE, "").strip():
        _train(document, recipe)
    try:
        _merge(document, _more(values.get(MORE, "")))
    except ValueError as error:
        errors[MORE] = str(error)
    return _checked(values, document, errors)


def _read(one: FormField, text: str) -> Iterator[tuple[str, Any]]:
    """The dotted paths and values of an input's text. Raises ValueError."""
    if one.path == ARGUMENTS:
        yield one.path, dict(_arguments(text))
    elif one.is_needs:
        yield from ((f"{one.path}.{path}", value) for path, value in map(parse_need, listed(text)))
    else:
        yield one.path, _number(text) if one.step else listed(text) if one.is_list else text


def of_spec(spec: Mapping[str, Any]) -> dict[str, str]:
    """The form values for a stored JobSpec. Fields without an input go into `more`, as JSON."""
    rest = json.loads(json.dumps(shortened(spec)))
    values = _other_strategies(spec["strategy"]["kind"])
    values |= {f"{MODEL_ARGS}.{name}": str(value) for name, value in GptArgs().model_dump().items()}
    for one in fields():
        found = _take(rest, one.path) if one.path != CODEC else None
        value = found if found is not None else _get(spec, one.path)
        if one.path != CODEC and value is not None:
            listing = need_texts(value) if one.is_needs else value
            if one.path == ARGUMENTS:
                value = "\n".join(f"{name}={json.dumps(argument)}" for name, argument in value.items())
            values[one.path] = ", ".join(listing) if one.is_list or one.is_needs else str(value)
    values[CODEC] = "auto" if spec["codec"] == "auto" else CHOSEN
    rest.pop(CODEC, None)
    rest.pop("recipe_facts", None)  # those of other arguments would be false
    if kept := _without_empty(rest):
        values[MORE] = json.dumps(kept, indent=2)
    return values


def of_defaults() -> dict[str, str]:
    """The form values for a new form: a job that trains in a minute, with all other fields at their defaults."""
    return of_spec(JobSpec(dataset="digits", model="mlp", epochs=5).model_dump(mode="json"))


def _other_strategies(kind: str) -> dict[str, str]:
    """The default values of all other strategies' inputs, shown when the user selects another strategy; without those
    that differ by strategy, whose inputs are left empty.
    """
    found: dict[str, set[str]] = {}
    for other in KINDS.keys() - {kind}:
        document = {"strategy": KINDS[other]().model_dump(mode="json")}
        for one in fields():
            is_its_own = one.path != STRATEGY and (not one.kinds or other in one.kinds)
            if is_its_own and (value := _get(document, one.path)) is not None:
                found.setdefault(one.path, set()).add(str(value))
    return {path: values.pop() for path, values in found.items() if len(values) == 1}


def _checked(values: Mapping[str, str], document: Document, errors: dict[str, str]) -> Filled:
    spec = None
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        errors = {**by_field(error.errors(include_url=False, include_context=False)), **errors}
    return Filled(values, document, None if errors else spec, errors)


def by_field(errors: Sequence[Mapping[str, Any]], within: str = "") -> dict[str, str]:
    """Errors in pydantic's form by the form's fields, the first of each; those of no field by the empty one.

    Args:
        within: the first part of their places, which is left out.
    """
    known = [*(one.path for one in fields()), MORE]
    found: dict[str, str] = {}
    for each in plain_errors(errors):
        path = ".".join(str(part) for part in each["loc"]).removeprefix(f"{within}.")
        text = each["msg"]
        near = (one for one in known if path and (one.startswith(f"{path}.") or path.startswith(f"{one}.")))
        where = path if path in known else next(near, "")  # of an object, or of a value in a list: its field
        found.setdefault(where, text if where or not path else f"{path}: {text}")
    return found


def _tidy(document: Document) -> None:
    """Remove arguments that the chosen optimizer does not have: the form sends the inputs of all optimizers."""
    for part in (*document.values(), *document.get("strategy", {}).values()):
        known = catalog().optimizers.get(part.get("name", "")) if isinstance(part, dict) else None
        if known:
            for name in [name for name in part if name != "name" and name not in known.arguments]:
                del part[name]


def _train(document: Document, recipe: str) -> None:
    """Make the document's job train a recipe, in place of a model on a built-in data set: the form sends all inputs."""
    for name in ("model", MODEL_ARGS, "input", "augment"):
        document.pop(name, None)
    if not is_own_name(document.get("dataset", "")):
        document.pop("dataset", None)
    document[RECIPE] = recipe


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """The names and values in the input of a recipe's arguments. Raises ValueError."""
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals:
            raise ValueError(f"{line[:50]!r} is no argument: write NAME=VALUE, for example width=256")
        try:
            yield name.strip(), json.loads(value)
        except (ValueError, RecursionError):
            yield name.strip(), value.strip()


def _more(text: str) -> Document:
    """Parse the input "Other fields (JSON)". Raises ValueError."""
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply: remove some levels") from error
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object such as {"strategy": {"max_norm": 1.0}}')
    return found


def _number(text: str) -> int | float:
    """Parse an integer or a finite number. Raises ValueError."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if math.isfinite(value := kind(text)):
                return value
    raise ValueError(f"{text!r} is not a number")


def _put(document: Document, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        document = document.setdefault(parent, {})
    document[name] = value


def _get(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _take(document: Document, path: str) -> Any:
    """Remove the value at `path` from a document and return it; None if there is none."""
    *parents, name = path.split(".")
    place = _get(document, ".".join(parents)) if parents else document
    return place.pop(name, None) if isinstance(place, dict) else None


def _merge(document: Document, other: Document) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(document.get(name), dict):
            _merge(document[name], value)
        else:
            document[name] = value


def _without_empty(document: Document) -> Document:
    kept = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in document.items()}
    return {name: value for name, value in kept.items() if value != {}}
