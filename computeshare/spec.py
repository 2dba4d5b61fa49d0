"""JobSpec: what a user asks for, checked completely before anything is stored.

Knows no torch: names, arguments and sizes come from the committed `catalog`.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from computeshare.catalog import ArgumentEntry, catalog
from computeshare.quorum import bad_values, tolerated
from computeshare.sampling import Plan

QUEUE_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
CodecName = Literal["float32", "float16", "bfloat16", "int8"]
DownCodecName = Literal["float32", "float16", "bfloat16"]
"""Those that leave alone what they have given once, as a restored version must be published as it was."""
LARGEST_NUMBER = 1e300
LARGEST_ARGUMENT = 1e8
"""Largest argument of an optimizer: torch itself stumbles over some that are larger."""
LARGEST_BYTES = 400_000_000
"""Largest weights, in bytes of float32: they travel as one value, which the broker takes up to 512 MB."""
LARGEST_ROUND_BYTES = 2 << 30
"""Largest round, in bytes of float32, that is held in memory at once to be combined by a median or a trimmed mean."""
Count = Annotated[int, Field(ge=0, le=10_000_000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)  # "32" and true are no numbers


class SyncStrategy(_Part):
    """Synchronous SGD: every version is made of the micro-batches of its round; with a quorum below 1, those that are
    late are carried over to the next.
    """

    kind: Literal["sync"] = "sync"
    quorum: float = Field(
        1.0, ge=0.5, le=1, description="share of the round to wait for past its deadline; 1: all of it"
    )
    backup: bool = Field(True, description="lease a slow micro-batch a second time near the round's end")
    combine: Literal["mean", "median", "trimmed_mean"] = "mean"
    max_norm: float | None = Field(None, gt=0, description="clip each update to this Euclidean norm")


class OptimizerSpec(BaseModel):
    """A `torch.optim` optimizer by name, with its own arguments beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "SGD"

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _known(self) -> Self:
        known = catalog().optimizers
        if self.name not in known:
            raise _wrong("optimizer", "name", f"unknown optimizer {self.name!r}; allowed: {', '.join(sorted(known))}")
        arguments = known[self.name].arguments
        for name, value in self.arguments.items():
            if name not in arguments:
                allowed = ", ".join(sorted(arguments))
                raise _wrong("optimizer", name, f"{self.name} takes no argument {name!r}; allowed: {allowed}")
            if problem := _problem(arguments[name], value):
                raise _wrong("optimizer", name, f"{self.name}'s {name} must be {problem}, not {value!r}"[:500])
        given = {name: entry.default for name, entry in arguments.items()} | self.arguments
        if given.get("nesterov") and not (given["momentum"] > 0 and given["dampening"] == 0):
            raise _wrong("optimizer", "nesterov", "nesterov needs a momentum above 0 and no dampening")
        return self


class CodecSpec(_Part):
    """How vectors travel: `up` for updates, `down` for weights."""

    up: CodecName = "float16"
    down: DownCodecName = "float32"


class WorkerRange(_Part):
    """How many workers a job waits for before it starts, and how many it takes at most."""

    min: int = Field(1, ge=1, le=1024)
    max: int = Field(8, ge=1, le=1024)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not be above max ({self.max})")
        return self


class JobSpec(_Part):
    """One training job. Unknown fields are errors; `rounds` or `epochs`, not both."""

    name: str = Field("", max_length=100)
    queue: str = Field("default", pattern=QUEUE_PATTERN)
    dataset: str
    model: str
    input: tuple[int, int, int] | None = Field(
        None, strict=False, description="channels, height, width; default the data set's"
    )
    micro_batch: int = Field(32, ge=1, le=65_536)
    micro_batches_per_round: int = Field(4, ge=1, le=4096)
    rounds: int | None = Field(None, ge=1, le=100_000_000)
    epochs: int | None = Field(None, ge=1, le=1_000_000)
    strategy: SyncStrategy = SyncStrategy()
    optimizer: OptimizerSpec = Field(default_factory=lambda: OptimizerSpec(name="SGD", lr=0.05, momentum=0.9))
    lr_scaling: Literal["none", "linear"] = "none"
    codec: CodecSpec = CodecSpec()
    workers: WorkerRange = WorkerRange()
    seed: int = Field(0, ge=0, lt=2**63)
    threads: int = Field(0, ge=0, le=256)
    checkpoint_every: Count = 100
    evaluate_every: Count = 100

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if re.search(r"[\x00-\x1f\x7f]", value):
            raise ValueError("name must not hold control characters")
        return value.strip()

    @field_validator("dataset", "model")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        known: dict[str, Any] = catalog().datasets if info.field_name == "dataset" else dict(catalog().models)
        if value not in known:
            raise ValueError(f"unknown {info.field_name} {value!r}; allowed: {', '.join(sorted(known))}")
        return value

    @field_validator("input")
    @classmethod
    def _bounded(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value and (value[0] not in (1, 3) or not all(1 <= side <= 1024 for side in value[1:])):
            raise ValueError(f"input must be [channels, height, width], 1 or 3 channels, sides 1 to 1024, not {value}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.rounds is not None and self.epochs is not None:
            raise ValueError("give rounds or epochs, not both")
        model, (_, height, width) = catalog().models[self.model], self.shape
        if min(height, width) < model.min_size:
            raise ValueError(
                f"model {self.model} needs an input of at least {model.min_size}x{model.min_size}, "
                f"{self.dataset} gives {height}x{width}: set input, for example [{self.shape[0]}, 32, 32], "
                f"or take model mlp"
            )
        if 4 * self.parameters * self._pieces > LARGEST_BYTES:
            raise ValueError(
                f"model {self.model} has {self.parameters:,} parameters at this input; with {self.optimizer.name} this "
                f"release takes models up to {LARGEST_BYTES // 4 // self._pieces:,} (weights and the optimizer's "
                f"state travel in one piece): choose a smaller model or input"
            )
        if model.batch_norm and self.plan.size(self.plan.micro_batches_per_epoch - 1) == 1:
            raise ValueError(
                f"micro_batch {self.micro_batch} leaves a last micro-batch of one sample, "
                f"which the batch normalisation of {self.model} cannot take: choose another"
            )
        self._bearable()
        return self

    def _bearable(self) -> None:
        """Raises ValueError where a robust combination would not keep what it promises, or the round in memory."""
        strategy, per_round = self.strategy, self.micro_batches_per_round
        if strategy.combine == "mean":
            return
        most = int(LARGEST_ROUND_BYTES * strategy.quorum) // (4 * self.parameters)
        if per_round > most:
            raise ValueError(
                f"combine {strategy.combine} holds a round's updates in memory, {LARGEST_ROUND_BYTES >> 30} GB at most"
                f": set micro_batches_per_round to {most:,} or less, choose a smaller model, or combine mean"
            )
        if not self.sharers:
            return
        if strategy.quorum < 1:
            raise ValueError(
                f"combine {strategy.combine} with {self.sharers} workers bears bad ones in whole rounds only: "
                f"set quorum to 1, or combine mean"
            )
        for count in sorted({per_round, self.plan.last_round_count}, reverse=True):
            if 2 * bad_values(count, self.sharers) >= count:
                where = "rounds" if count == per_round else "an epoch's last round"
                raise ValueError(
                    f"combine {strategy.combine} bears {tolerated(self.sharers)} of {self.sharers} workers only while "
                    f"their shares are less than half of a round; {where} of {count} micro-batches cannot be shared "
                    f"out so: make micro_batches_per_round a multiple of workers.min ({self.sharers})"
                    + ("" if count == per_round else ", and choose micro_batch so that the last round is one, too")
                )

    @property
    def sharers(self) -> int:
        """How many workers must share a round for its combination to bear bad ones; 0: any number may make it."""
        return self.workers.min if self.strategy.combine != "mean" and tolerated(self.workers.min) else 0

    @property
    def fewest_workers(self) -> int:
        """How many workers must be there for the rounds to go on."""
        return min(self.workers.min, self.micro_batches_per_round)

    def quorum_of(self, version: int) -> float:
        """The quorum of the round that starts from `version`: an epoch's last round, and the job's, wait for all."""
        last = self.plan.ends_epoch(version) or version + 1 == self.rounds_total
        return 1.0 if last else self.strategy.quorum

    @property
    def title(self) -> str:
        return self.name or f"{self.model} on {self.dataset}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the model sees."""
        return self.input or catalog().datasets[self.dataset].shape

    @property
    def parameters(self) -> int:
        """The model's number of parameters, at most: the first dense layer of our own models grows with the input."""
        model = catalog().models[self.model]
        if model.source != "computeshare":
            return model.parameters
        size, reference = (c * h * w for c, h, w in (self.shape, model.reference_shape))
        return max(model.parameters, -(-model.parameters * size // reference))

    @property
    def _pieces(self) -> int:
        """How many vectors of the model's size the largest value holds: the optimizer's state, at least the weights."""
        return (1 if self.optimizer.name == "SGD" else 3) + (self.codec.down != "float32")

    @property
    def broker_bytes(self) -> int:
        """What the job may take of the broker's memory at most: weights and state, of the version, of those before and
        after it; the updates of a round, and of the one before until its state is stored.
        """
        up, down = (4 if codec == "float32" else 2 for codec in (self.codec.up, self.codec.down))
        updates = 2 * self.micro_batches_per_round * up
        return 1_000_000 + self.parameters * (3 * down + 3 * 4 * self._pieces + updates)

    @property
    def plan(self) -> Plan:
        """The division of the job's samples into micro-batches and rounds."""
        samples = catalog().datasets[self.dataset].train
        return Plan(self.seed, samples, self.micro_batch, self.micro_batches_per_round)

    @property
    def rounds_total(self) -> int:
        if self.rounds is not None:
            return self.rounds
        return (self.epochs or 1) * self.plan.rounds_per_epoch

    def wants_checkpoint(self, version: int) -> bool:
        """Whether the weights of this version are to be kept on disk whatever the time."""
        return self.wants_score(version) or _is_multiple(version, self.checkpoint_every)

    def wants_score(self, version: int) -> bool:
        """Whether this version is to be scored on the test set."""
        return version == self.rounds_total or _is_multiple(version, self.evaluate_every)


def _is_multiple(version: int, every: int) -> bool:
    return every > 0 and version > 0 and version % every == 0


def _wrong(title: str, field: str, message: str) -> ValidationError:
    """An error that names a field which the model only knows by its catalog."""
    kind = PydanticCustomError("value_error", "{text}", {"text": message})
    return ValidationError.from_exception_data(title, [InitErrorDetails(type=kind, loc=(field,), input=None)])


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
