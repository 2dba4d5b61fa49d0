"""A seat's requests to a recipe's process, and the answers of that process. Pure.

Answers come from a user's code: their heads are small, their values are checked here, and their vectors lie in shared
memory, whose size follows from the job's layout.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from computeshare.errors import (
    ArtifactError,
    CodecError,
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
_KEPT = ArtifactError, CodecError, Interrupted, RecipeError, RecipeUnfit, SettingsError
_KINDS = {one.__name__: one for one in _KEPT}
"""The errors that keep their kind between the processes; others are the recipe's."""
Bytes = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Text = Annotated[str, Field(max_length=200)]
TAG = r"^[fbt][0-9]{1,4}(\.[0-9]{1,9})?$"
"""The tags of messages between stages."""


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
    """Compute a unit, or a part of its steps."""

    do: Literal["compute"] = "compute"
    unit: int
    by_bucket: bool
    part: tuple[int, int] | None = None


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


class Split(Head):
    """Split the model into stages."""

    do: Literal["split"] = "split"


class HoldStages(Head):
    """Hold a run of stages of the split model, from `first` to before `stop`, in place of another run."""

    do: Literal["hold_stages"] = "hold_stages"
    stages: str
    """The split, as by `StagePlan.dump`."""
    first: int
    stop: int


class TestStages(Head):
    """Test the device with the stages that take no more than `room_bytes`."""

    do: Literal["test_stages"] = "test_stages"
    stages: str
    room_bytes: int


class RateStage(Head):
    """Measure how fast a stage computes; the stages that are held are given up."""

    do: Literal["rate_stage"] = "rate_stage"
    stages: str
    number: int


class ComputeStages(Head):
    """Compute the held stages of a unit."""

    do: Literal["compute_stages"] = "compute_stages"
    unit: int


class Delivered(Head):
    """The message from another stage that was wanted is in the body."""

    do: Literal["delivered"] = "delivered"


class CalledOff(Head):
    """The message that was wanted will not come."""

    do: Literal["called_off"] = "called_off"


Request = Annotated[
    Open
    | Test
    | MeasureSaved
    | Try
    | Walk
    | Build
    | Load
    | Prefetch
    | Compute
    | Dump
    | Restore
    | Score
    | Split
    | HoldStages
    | TestStages
    | RateStage
    | ComputeStages
    | Delivered
    | CalledOff,
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
    """A bucket of the update is in shared memory or, under the number after the last, its buffers."""

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


class SplitUp(Head):
    """The model is split; the body says how, as `StagePlan.dump`."""

    say: Literal["split_up"] = "split_up"


class Rated(Head):
    """The work per second of a stage; 0: it could not be measured."""

    say: Literal["rated"] = "rated"
    rate: float = Field(ge=0, le=1e30)


class Posted(Head):
    """A message to a stage that another worker holds is in the body."""

    say: Literal["posted"] = "posted"
    stage: int
    tag: str = Field(pattern=TAG)


class Wanted(Head):
    """A message to a held stage is waited for."""

    say: Literal["wanted"] = "wanted"
    stage: int
    tag: str = Field(pattern=TAG)


class StageComputed(Head):
    """A held stage's result, as `StageUpdate`."""

    stage: int
    loss: float | None
    forward_s: Seconds
    backward_s: Seconds
    most_in_flight: Bytes
    sent_bytes: Bytes


class StagesComputed(Head):
    """The held stages of a unit are computed, and their buffers are in shared memory."""

    say: Literal["stages_computed"] = "stages_computed"
    stages: tuple[StageComputed, ...] = Field(max_length=1000)
    peak_bytes: Bytes


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
    Opened
    | Tested
    | Number
    | Built
    | Done
    | Step
    | Bucket
    | Computed
    | State
    | Scored
    | SplitUp
    | Rated
    | Posted
    | Wanted
    | StagesComputed
    | Failed,
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
