"""The optimizers that a JobSpec may name.

Imports no torch: names and arguments come from the committed `catalog`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from computeshare.jobspec.catalog import ArgumentEntry, catalog
from computeshare.jobspec.controls import OPTIMIZER, Control
from computeshare.jobspec.part import error_at

LARGEST_NUMBER = 1e300
LARGEST_ARGUMENT = 1e8
"""The largest argument of an optimizer: torch itself fails with some larger values."""
BY_VALUE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Element-wise optimizers: the tensor that a value belongs to does not matter."""


class OptimizerSpec(BaseModel):
    """An optimizer of `torch.optim`: its `name`, and its arguments as further fields."""

    model_config = ConfigDict(extra="allow", frozen=True)

    COMMON: ClassVar[dict[str, Any]] = {
        "lr": Annotated[float, Control(OPTIMIZER, "--lr"), Field(title="Learning rate")],
        "momentum": Annotated[
            float,
            Control(OPTIMIZER, "--momentum"),
            Field(title="Momentum", description="for optimizers that have this argument"),
        ],
    }
    """Arguments with a control of their own. The catalog has all arguments, with their ranges."""

    name: Annotated[str, Control(OPTIMIZER, "--optimizer")] = Field(
        "SGD", title="Optimizer", description="from torch.optim; arguments left out beside a name have torch's defaults"
    )

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> Self:
        known = catalog().optimizers
        if self.name not in known:
            raise error_at("optimizer", "name", f"unknown optimizer {self.name!r}; allowed: {', '.join(sorted(known))}")
        arguments = known[self.name].arguments
        for name, value in self.arguments.items():
            if name not in arguments:
                allowed = ", ".join(sorted(arguments))
                raise error_at("optimizer", name, f"{self.name} has no argument {name!r}; allowed: {allowed}")
            if problem := _problem(arguments[name], value):
                raise error_at("optimizer", name, f"{self.name}'s {name} must be {problem}, not {value!r}"[:500])
        given = {name: entry.default for name, entry in arguments.items()} | self.arguments
        if given.get("nesterov") and not (given["momentum"] > 0 and given["dampening"] == 0):
            raise error_at("optimizer", "nesterov", "nesterov needs momentum above 0 and dampening 0")
        return self


def changing(default: Mapping[str, Any]) -> BeforeValidator:
    """A validator for a field with this default: an object without a name changes the default's arguments."""

    def completed(value: Any) -> Any:
        is_nameless = isinstance(value, dict) and "name" not in value
        return {**default, **value} if is_nameless else value

    return BeforeValidator(completed)


def _problem(entry: ArgumentEntry, value: Any) -> str | None:
    """The condition that an argument's value breaks, in words that follow "must be"; None: the value is valid."""
    if value is None and entry.nullable:
        return None
    if not _is_kind(value, entry.kind):
        return f"a {entry.kind}" if entry.kind != "numbers" else "a list of numbers"
    values = value if entry.kind == "numbers" else [value]
    if entry.kind == "numbers" and len(values) != len(entry.ranges):
        return f"{len(entry.ranges)} numbers"
    for allowed, number in zip(entry.ranges, values, strict=False):  # what is no number has no ranges
        if not allowed.holds(number):
            return str(allowed)
        if number is not None and abs(number) > LARGEST_ARGUMENT:
            return f"at most {LARGEST_ARGUMENT:g}"
    return None


def _is_kind(value: object, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER
    match kind:
        case "number":
            return number
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case _:
            return isinstance(value, list | tuple) and all(v is None or _is_kind(v, "number") for v in value)
