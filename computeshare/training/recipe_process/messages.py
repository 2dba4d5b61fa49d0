"""A seat's requests to a recipe's process, and the answers of that process. Pure.

Answers come from a user's code: their heads are small, their values are checked here, and their vectors lie in shared
memory, whose size follows from the job's layout.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from computeshare.errors import (
    ArtifactError,
    ComputeShareError,
    Interrupted,
    RecipeError,
    RecipeUnfit,
    SettingsError,
)
from computeshare.tasks.class_counts import ClassCounts
from computeshare.types import Precision, plain

MOST_HEAD, MOST_REQUEST = 1 << 20, 64 << 20
MOST_MESSAGE = 2000
_KINDS = {one.__name__: one for one in (ArtifactError, Interrupted, RecipeError, RecipeUnfit, SettingsError)}
"""The errors that keep their kind between the processes; others are the recipe's."""
Bytes = Annotated[int, Field(ge=0, le=2**53)]
Text = Annotated[str, Field(max_length=200)]


class Head(BaseModel):
    """The head of a message."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    def dumps(self) -> bytes:
        return self.model_dump_json().encode()


class Open(Head):
    """Import the recipe and build its model on a device."""

    do: Literal["open"] = "open"
    spec: str
    device: str | None
    recipe: str
    """The folder with the recipe's files."""
    initial: str
    """The folder with the files of the initial state."""
    data: str | None
    """The folder with the data set's files."""
    part: Literal["train", "validation", "test"]
    """Of the data, to begin with."""


class Test(Head):
    """Test the device with the model."""

    do: Literal["test"] = "test"


class MeasureSaved(Head):
    """Tell the bytes per sample that the forward pass saves in bfloat16."""

    do: Literal["measure_saved"] = "measure_saved"


class Try(Head):
    """Make a copy of the model that computes in a precision."""

    do: Literal["try"] = "try"
    spec: str
    precision: Precision


class Walk(Head):
    """Compute micro-batches with such a copy."""

    do: Literal["walk"] = "walk"
    precision: Precision
    micro_batches: tuple[int, ...]


class Build(Head):
    """Build the replica for the job's strategy."""

    do: Literal["build"] = "build"
    spec: str


class Load(Head):
    """Start from the weights in shared memory."""

    do: Literal["load"] = "load"


class Prefetch(Head):
    """Assemble the batches of micro-batches."""

    do: Literal["prefetch"] = "prefetch"
    micro_batches: tuple[int, ...]


class Compute(Head):
    """Compute a unit."""

    do: Literal["compute"] = "compute"
    unit: int
    by_bucket: bool


class Dump(Head):
    """Send the inner state."""

    do: Literal["dump"] = "dump"


class Restore(Head):
    """Go on from the inner state in the body."""

    do: Literal["restore"] = "restore"


class Score(Head):
    """Score the weights in shared memory on a part of the data."""

    do: Literal["score"] = "score"
    part: Literal["train", "validation", "test"]
    batch: int


Request = Annotated[
    Open | Test | MeasureSaved | Try | Walk | Build | Load | Prefetch | Compute | Dump | Restore | Score,
    Field(discriminator="do"),
]
_REQUEST: TypeAdapter[Any] = TypeAdapter(Request)


class Memory(Head):
    """The memory of the recipe's process and its device, in bytes."""

    resident: Bytes
    peak: Bytes
    room: Bytes


class Opened(Head):
    """The model is built."""

    say: Literal["opened"] = "opened"
    device: Text
    device_type: Literal["cpu", "cuda", "mps"]
    kind: dict[Text, Annotated[int, Field(ge=-(2**53), le=2**53)] | Text] = Field(max_length=20)
    memory: Memory


class Tested(Head):
    """As `SelfTestResult`."""

    say: Literal["tested"] = "tested"
    error: float
    seconds: float
    saved_bytes: Bytes
    trouble: str = Field(max_length=MOST_MESSAGE)
    memory: Memory


class Number(Head):
    """The answer is a number."""

    say: Literal["number"] = "number"
    value: Bytes


class Built(Head):
    """The replica is built. `is_kept`: it keeps an inner state."""

    say: Literal["built"] = "built"
    compiler: Text
    trouble: str = Field(max_length=MOST_MESSAGE)
    is_kept: bool


class Done(Head):
    """It is done."""

    say: Literal["done"] = "done"


class Step(Head):
    """Another step of what was asked for is done: `number` counts them."""

    say: Literal["step"] = "step"
    number: int


class Bucket(Head):
    """A bucket of the update is in shared memory."""

    say: Literal["bucket"] = "bucket"
    number: int


class Computed(Head):
    """A unit is computed: its buffers are in shared memory and, unless it went by buckets, its vector."""

    say: Literal["computed"] = "computed"
    loss: float
    peak_bytes: Bytes


class State(Head):
    """The inner state is in the body, if there is one."""

    say: Literal["state"] = "state"
    is_there: bool


class Scored(Head):
    """As `SplitScore`."""

    say: Literal["scored"] = "scored"
    loss: float
    metrics: dict[Text, float] = Field(max_length=50)
    samples: Bytes
    classes: ClassCounts | None


class Failed(Head):
    """It failed."""

    say: Literal["failed"] = "failed"
    kind: Text
    message: str = Field(max_length=MOST_MESSAGE)

    @classmethod
    def of(cls, error: ComputeShareError) -> "Failed":
        return cls(kind=type(error).__name__, message=str(error)[:MOST_MESSAGE])

    @property
    def error(self) -> ComputeShareError:
        return _KINDS.get(self.kind, RecipeError)(plain(self.message, lines=True))


Reply = Annotated[
    Opened | Tested | Number | Built | Done | Step | Bucket | Computed | State | Scored | Failed,
    Field(discriminator="say"),
]
_REPLY: TypeAdapter[Any] = TypeAdapter(Reply)


def request_in(head: bytes) -> Any:
    """Parse a request."""
    return _REQUEST.validate_json(head)


def reply_in(head: bytes) -> Any:
    """Parse an answer. Raises RecipeError."""
    try:
        return _REPLY.validate_json(head)
    except ValidationError as error:
        raise RecipeError("the recipe's process sent a message that makes no sense: it is broken") from error
