"""How a job's model is moved: the strategies and the optimizers that a JobSpec may name.

Knows no torch: names and arguments of optimizers come from the committed `catalog`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from computeshare.jobspec.catalog import ArgumentEntry, catalog
from computeshare.jobspec.controls import OPTIMIZER, ROUND, Control
from computeshare.jobspec.staleness import Weighting

LARGEST_NUMBER = 1e300
LARGEST_ARGUMENT = 1e8
"""Largest argument of an optimizer: torch itself stumbles over some that are larger."""
LARGEST_ROUND = 4096
"""Most updates that a version may be made of."""
LARGEST_LOCAL_ROUND = 100_000
"""Most micro-batches in all the replicas of a round."""
Backup = Annotated[bool, Field(description="lease slow work a second time once nothing else is left to lease")]


class Part(BaseModel):
    """An object within a JobSpec: unknown fields are errors, and "32" or true are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OptimizerSpec(BaseModel):
    """A `torch.optim` optimizer by name, with its own arguments beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    COMMON: ClassVar[dict[str, Any]] = {
        "lr": Annotated[float, Control(OPTIMIZER, "--lr"), Field(title="Learning rate")],
        "momentum": Annotated[
            float,
            Control(OPTIMIZER, "--momentum"),
            Field(title="Momentum", description="of optimizers that have one"),
        ],
    }
    """Arguments that have a control of their own; which there are, and within which limits, the catalog says."""

    name: Annotated[str, Control(OPTIMIZER, "--optimizer")] = Field(
        "SGD", title="Optimizer", description="of torch.optim; another one starts from its own defaults"
    )

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> Self:
        known = catalog().optimizers
        if self.name not in known:
            raise wrong("optimizer", "name", f"unknown optimizer {self.name!r}; allowed: {', '.join(sorted(known))}")
        arguments = known[self.name].arguments
        for name, value in self.arguments.items():
            if name not in arguments:
                allowed = ", ".join(sorted(arguments))
                raise wrong("optimizer", name, f"{self.name} takes no argument {name!r}; allowed: {allowed}")
            if problem := _problem(arguments[name], value):
                raise wrong("optimizer", name, f"{self.name}'s {name} must be {problem}, not {value!r}"[:500])
        given = {name: entry.default for name, entry in arguments.items()} | self.arguments
        if given.get("nesterov") and not (given["momentum"] > 0 and given["dampening"] == 0):
            raise wrong("optimizer", "nesterov", "nesterov needs a momentum above 0 and no dampening")
        return self


class SyncStrategy(Part):
    """Synchronous SGD: every version is made of the micro-batches of its round; with a quorum below 1, those that are
    late are carried over to the next.
    """

    kind: Annotated[Literal["sync"], Control(ROUND, None)] = Field(
        "sync", title="Strategy", description="sync: as one machine; local: thin links; async: unequal machines"
    )
    quorum: float = Field(
        1.0, ge=0.5, le=1, description="share of the round to wait for past its deadline; 1: all of it"
    )
    backup: Backup = True
    combine: Literal["mean", "median", "trimmed_mean"] = "mean"
    max_norm: float | None = Field(None, gt=0, description="clip each update to this Euclidean norm")

    @property
    def implied(self) -> dict[str, Any]:
        """Fields of the JobSpec that follow from the strategy, and what they are."""
        return {}


class AsyncStrategy(Part):
    """Buffered asynchronous SGD (FedBuff, arXiv:2106.06639): a version is made of the `buffer` updates that arrive
    first, also of those computed on an earlier version.
    """

    kind: Literal["async"] = "async"
    buffer: Annotated[int, Control(ROUND, None)] = Field(
        10, ge=1, le=LARGEST_ROUND, title="Buffer", description="updates that make a version, of a micro-batch each"
    )
    max_staleness: Annotated[int, Control(ROUND, None)] = Field(
        10,
        ge=0,
        le=1000,
        title="Staleness at most",
        description="how many versions late; what is later is computed again",
    )
    weighting: Weighting = Field("inverse_sqrt", description="how an update's weight falls with its staleness")
    backup: Backup = True

    @property
    def implied(self) -> dict[str, Any]:
        """Fields of the JobSpec that follow from the strategy, and what they are."""
        return {"micro_batches_per_round": self.buffer}


class LocalStrategy(Part):
    """Local SGD and DiLoCo (arXiv:2311.08105): each of `replicas` takes `inner_steps` steps of its own, a micro-batch
    each, from the version's weights; the mean of how far they went is one step of an outer Nesterov momentum.

    An outer rate of 1 and a momentum of 0 give plain local SGD: the mean of the replicas' weights.
    """

    kind: Literal["local"] = "local"
    inner_steps: Annotated[int, Control(ROUND, None)] = Field(
        20, ge=1, le=10_000, title="Inner steps", description="micro-batches a replica steps through in a round"
    )
    replicas: Annotated[int, Control(ROUND, None)] = Field(
        4, ge=1, le=LARGEST_ROUND, title="Replicas per round", description="at most this many workers are busy"
    )
    inner_optimizer: OptimizerSpec = Field(
        default_factory=lambda: OptimizerSpec(name="AdamW", lr=1e-3),
        description="takes the inner steps; with momentum of its own it wants an outer_momentum of 0 or small rates",
    )
    outer_lr: Annotated[float, Control(ROUND, None)] = Field(
        0.7, gt=0, le=1000, title="Outer rate", description="of the outer steps"
    )
    outer_momentum: Annotated[float, Control(ROUND, None)] = Field(
        0.9, ge=0, lt=1, title="Outer momentum", description="Nesterov momentum of the outer steps; 0: none"
    )
    inner_state: Literal["restart", "kept"] = Field(
        "restart",
        description="the inner optimizer's state: afresh every round, or kept by the worker, which hands it over when "
        "it leaves (then the bits depend on who took part)",
    )
    scale_steps: bool = Field(
        False,
        description="share a round's micro-batches out by how fast each replica's worker was, inner_steps on average "
        "(then the bits depend on the workers' speeds, which the log holds)",
    )
    backup: Backup = True

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.replicas * self.inner_steps > LARGEST_LOCAL_ROUND:
            raise ValueError(
                f"replicas times inner_steps must be at most {LARGEST_LOCAL_ROUND:,}, "
                f"not {self.replicas * self.inner_steps:,}"
            )
        return self

    @property
    def outer_optimizer(self) -> OptimizerSpec:
        """The server's optimizer: its gradient is the mean pseudo-gradient."""
        nesterov = self.outer_momentum > 0
        return OptimizerSpec(name="SGD", lr=self.outer_lr, momentum=self.outer_momentum, nesterov=nesterov)

    @property
    def implied(self) -> dict[str, Any]:
        """Fields of the JobSpec that follow from the strategy, and what they are."""
        return {"micro_batches_per_round": self.replicas * self.inner_steps, "optimizer": self.outer_optimizer}


AnyStrategy: TypeAlias = SyncStrategy | AsyncStrategy | LocalStrategy
KINDS: dict[str, type[AnyStrategy]] = {"sync": SyncStrategy, "async": AsyncStrategy, "local": LocalStrategy}


def chosen(value: Any) -> AnyStrategy:
    """The strategy of the kind that `value`, an object or a strategy, names; `sync` where it names none.

    Raises: ValidationError, ValueError: it is none that a job may ask for.
    """
    if not isinstance(value, dict | AnyStrategy):
        raise ValueError("strategy must be an object with a kind and that kind's fields")
    kind = value.get("kind", "sync") if isinstance(value, dict) else value.kind
    if kind not in list(KINDS):  # a list, for what cannot be hashed
        expected = ", ".join(f"'{name}'" for name in KINDS)
        error = InitErrorDetails(type="literal_error", loc=("kind",), input=kind, ctx={"expected": expected})
        raise ValidationError.from_exception_data("strategy", [error])
    if not isinstance(value, dict):
        return value
    known = KINDS[kind].model_fields
    for name in value:
        if name not in known:
            raise wrong("strategy", str(name), f"unknown field; strategy {kind} takes: {', '.join(sorted(known))}")
    return KINDS[kind].model_validate(value)


Strategy: TypeAlias = Annotated[AnyStrategy, BeforeValidator(chosen)]


def wrong(title: str, field: str | tuple[str, ...], message: str) -> ValidationError:
    """An error that names a field (or one within it) where pydantic would name the whole object."""
    kind = PydanticCustomError("value_error", "{text}", {"text": message})
    loc = (field,) if isinstance(field, str) else field
    return ValidationError.from_exception_data(title, [InitErrorDetails(type=kind, loc=loc, input=None)])


def _problem(entry: ArgumentEntry, value: Any) -> str | None:
    """What an optimizer's argument has to be, if it is not."""
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
