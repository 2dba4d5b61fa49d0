"""The form for a new job: its fields, and from what was filled in to the JobSpec's document and back. Pure."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.export import shortened
from computeshare.jobspec.spec import CodecName, JobSpec
from computeshare.jobspec.strategy_fields import KINDS

Document = dict[str, Any]
STRATEGY, CODEC, MORE = "strategy.kind", "codec", "more"
CHOSEN = "manual"
"""Instead of `auto`: the codecs are those of the two fields beside."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One field: where in the JobSpec it stands, and what its reader needs to fill it in.

    `kinds`: the strategies that have it; none: all. `step`: of a number, `any` for one with a fraction.
    """

    path: str
    label: str
    hint: str = ""
    choices: Sequence[str] = ()
    step: str = ""
    kinds: Sequence[str] = ()

    @property
    def id(self) -> str:
        return self.path.replace(".", "-").replace("_", "-")


OTHERS = FormField(
    MORE,
    "Any other field, as JSON",
    'for example {"strategy": {"max_norm": 1.0}, "optimizer": {"weight_decay": 0.0005}}',
)
"""The last field, for whatever has none of its own."""


@dataclass(frozen=True, slots=True)
class Group:
    """Fields under a heading; `open` says whether they are shown from the start."""

    heading: str
    fields: Sequence[FormField]
    open: bool = True


@dataclass(frozen=True, slots=True)
class Filled:
    """A form as it was filled in: the document it makes, and what is wrong with it, by field (empty: the whole)."""

    values: Mapping[str, str]
    document: Document
    spec: JobSpec | None
    errors: Mapping[str, str] = field(default_factory=dict)


def _codecs(path: str, label: str) -> FormField:
    return FormField(path, label, choices=get_args(CodecName))


def groups() -> Sequence[Group]:
    """The form, from top to bottom."""
    known = catalog()
    optimizers = sorted(known.optimizers)
    return (
        Group(
            "What to train",
            (
                FormField("dataset", "Data set", choices=sorted(known.datasets)),
                FormField("model", "Model", choices=sorted(known.models, key=lambda name: (_foreign(name), name))),
                FormField("name", "Name", "what the pages call it; by default model and data set"),
                FormField("queue", "Queue", "workers of this queue may serve it"),
                FormField("epochs", "Epochs", "how long; leave it empty to count rounds", step="1"),
                FormField("rounds", "Rounds", "instead of epochs", step="1"),
            ),
        ),
        Group(
            "How a version is made",
            (
                FormField(
                    STRATEGY,
                    "Strategy",
                    "sync: as one machine; local: thin links; async: unequal machines",
                    choices=sorted(KINDS, key=list(KINDS).index),
                ),
                FormField("micro_batch", "Samples in a micro-batch", step="1"),
                FormField(
                    "micro_batches_per_round",
                    "Micro-batches in a round",
                    "their samples are the global batch",
                    step="1",
                    kinds=("sync",),
                ),
                FormField(
                    "strategy.inner_steps",
                    "Inner steps",
                    "micro-batches a replica steps through in a round",
                    step="1",
                    kinds=("local",),
                ),
                FormField(
                    "strategy.replicas",
                    "Replicas per round",
                    "at most this many workers are busy",
                    step="1",
                    kinds=("local",),
                ),
                FormField("strategy.outer_lr", "Outer rate", step="any", kinds=("local",)),
                FormField("strategy.outer_momentum", "Outer momentum", step="any", kinds=("local",)),
                FormField("strategy.buffer", "Buffer", "updates that make a version", step="1", kinds=("async",)),
                FormField(
                    "strategy.max_staleness",
                    "Staleness at most",
                    "how many versions late",
                    step="1",
                    kinds=("async",),
                ),
            ),
        ),
        Group(
            "Optimizer",
            (
                FormField("optimizer.name", "Optimizer", choices=optimizers, kinds=("sync", "async")),
                FormField("optimizer.lr", "Learning rate", step="any", kinds=("sync", "async")),
                FormField(
                    "optimizer.momentum", "Momentum", "of optimizers that have one", step="any", kinds=("sync", "async")
                ),
                FormField("strategy.inner_optimizer.name", "Inner optimizer", choices=optimizers, kinds=("local",)),
                FormField("strategy.inner_optimizer.lr", "Inner learning rate", step="any", kinds=("local",)),
            ),
        ),
        Group(
            "Links and machines",
            (
                FormField(
                    CODEC,
                    "Compression",
                    "auto: chosen once, by what the first workers measure",
                    choices=("auto", CHOSEN),
                ),
                _codecs("codec.up", "Updates, up"),
                _codecs("codec.down", "Weights, down"),
                FormField("workers.min", "Workers to wait for", step="1"),
                FormField("workers.max", "Workers at most", step="1"),
            ),
        ),
        Group(
            "More",
            (
                FormField("checkpoint_every", "Versions between checkpoints", "0: only at the end", step="1"),
                FormField("evaluate_every", "Versions between scorings", "0: only at the end", step="1"),
                FormField(
                    "keep.last", "Newest checkpoints kept", "at least two while it runs, and the final one", step="1"
                ),
                FormField("keep.best", "Best checkpoints kept", "by test accuracy", step="1"),
                FormField("keep.every", "Also keep every", "versions; 0: none", step="1"),
                FormField("priority", "Priority", "-100 to 100: those of higher priority get workers first", step="1"),
                FormField("seed", "Seed", "of the weights, the order and the dropout", step="1"),
                FormField("threads", "CPU threads of a worker", "0: the machine decides", step="1"),
            ),
            open=False,
        ),
    )


def _foreign(model: str) -> bool:
    return catalog().models[model].source != "computeshare"


def fields() -> Iterator[FormField]:
    """All of them, in order."""
    for group in groups():
        yield from group.fields


def wrong(form: Filled) -> Sequence[FormField]:
    """The fields that something is wrong with, in order."""
    return [one for one in (*fields(), OTHERS) if one.path in form.errors]


def filled(values: Mapping[str, str]) -> Filled:
    """What a form that was filled in asks for. What is empty is left to its default."""
    kind = values.get(STRATEGY) or "sync"
    document: Document = {}
    errors: dict[str, str] = {}
    for one in fields():
        text = values.get(one.path, "").strip()
        if text and one.path != CODEC and (not one.kinds or kind in one.kinds):
            try:
                _put(document, one.path, _number(text) if one.step else text)
            except ValueError:
                errors[one.path] = f"{text!r} is not a number"
    if values.get(CODEC) == "auto":
        document[CODEC] = "auto"
    _tidy(document)
    try:
        _merge(document, _more(values.get(MORE, "")))
    except ValueError as error:
        errors[MORE] = str(error)
    return _checked(values, document, errors)


def of_spec(spec: Mapping[str, Any]) -> dict[str, str]:
    """The form's values for a stored JobSpec; what the form has no field for stands in `more`, as JSON."""
    rest = json.loads(json.dumps(shortened(spec)))
    values = _other_strategies(spec["strategy"]["kind"])
    for one in fields():
        found = _take(rest, one.path) if one.path != CODEC else None
        value = found if found is not None else _get(spec, one.path)
        if one.path != CODEC and value is not None:
            values[one.path] = str(value)
    values[CODEC] = "auto" if spec["codec"] == "auto" else CHOSEN
    rest.pop(CODEC, None)
    if kept := _without_empty(rest):
        values[MORE] = json.dumps(kept, indent=2)
    return values


def of_defaults() -> dict[str, str]:
    """The form's values for the job that is made of defaults: the smallest that trains."""
    return of_spec(JobSpec(dataset="digits", model="mlp", epochs=5).model_dump(mode="json"))


def _other_strategies(kind: str) -> dict[str, str]:
    """The defaults of the strategies that a job has not, for whoever chooses one of them."""
    found = {}
    for other, strategy in KINDS.items():
        document = {"strategy": strategy().model_dump(mode="json")} if other != kind else {}
        for one in fields():
            if (value := _get(document, one.path)) is not None and one.path != STRATEGY:
                found[one.path] = str(value)
    return found


def _checked(values: Mapping[str, str], document: Document, errors: dict[str, str]) -> Filled:
    known = {one.path for one in fields()} | {MORE}
    spec = None
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        for each in error.errors(include_url=False, include_context=False):
            path = ".".join(str(part) for part in each["loc"])
            text = each["msg"].removeprefix("Value error, ")
            where = path if path in known else ""
            errors.setdefault(where, text if where or not path else f"{path}: {text}")
    return Filled(values, document, None if errors else spec, errors)


def _tidy(document: Document) -> None:
    """Leave out what stands for nothing: arguments of an optimizer that has none of them."""
    optimizer = document.get("optimizer", {})
    known = catalog().optimizers.get(optimizer.get("name", ""))
    if known:
        for name in [name for name in optimizer if name != "name" and name not in known.arguments]:
            del optimizer[name]


def _more(text: str) -> Document:
    """Further fields as JSON. Raises ValueError."""
    try:
        found = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"this is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("this is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError('give an object of fields, such as {"strategy": {"max_norm": 1.0}}')
    return found


def _number(text: str) -> int | float:
    """Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        if math.isfinite(value := float(text)):
            return value
        raise


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
    """Get a value out of a document, if it is there."""
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
