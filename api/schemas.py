"""The schemas of the REST API's answers and requests.

Times are ISO 8601 in UTC, sizes are bytes, durations are seconds.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from computeshare.jobspec.fields import editable
from computeshare.jobspec.spec import QUEUE_PATTERN
from computeshare.runtime.log_lines import Level
from computeshare.types import JobStatus, Kind, Outcome


def instant(value: object) -> object:
    """Convert milliseconds since the epoch, as in the tables, to a time in UTC; leave other types to pydantic."""
    return datetime.fromtimestamp(value / 1000, UTC) if isinstance(value, int) else value


Instant = Annotated[datetime, BeforeValidator(instant)]


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class ReducerPublic(_Answer):
    """The active reducer: the process that makes the next version."""

    host: str
    pid: int
    kind: Kind | None = Field(description="of the machine that published the first weights; none where not recorded")


class ForkedFrom(_Answer):
    """The version of another job that a job started from; the other job may have been deleted since."""

    job_id: str
    version: int
    sha256: str
    optimizer: Literal["kept", "fresh"] = Field(description="whether the optimizer's state was taken over too")


class ForkRequest(BaseModel):
    """The version of a job to start a new job from, and the fields of the new job that differ."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=0, lt=2**53)] | Literal["latest", "best"] = "latest"
    spec: dict[str, Any] = Field({}, description="fields of the JobSpec that change; the others are the parent's")
    optimizer: Literal["kept", "fresh"] | None = Field(
        None, description="whether to continue with the optimizer's state; by default where its settings stay the same"
    )


_CHANGES: dict[str, Any] = {
    name: (Annotated[(info.annotation, *info.metadata)] | None, Field(None, description=info.description))
    for name, info in editable("active", "always").items()
}
_Editable: Any = create_model("_Editable", **_CHANGES)


class JobChange(_Editable):
    """Changes of a job: at least one field. Name and notes can always change, other fields until the job ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.changes:
            raise ValueError(f"give at least one of: {', '.join(editable('active', 'always'))}")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """The given fields with their new values."""
        return self.model_dump(exclude_none=True)


class JobPublic(_Answer):
    """A job as clients see it."""

    id: str
    name: str
    title: str = Field(description="the name, or the model and the data set where the job has none")
    queue: str
    priority: int = Field(description="higher-priority jobs get workers first")
    spec: dict[str, Any] = Field(description="the JobSpec with its defaults filled in")
    status: JobStatus
    reason: str | None = Field(description="why the job is not running, and what would help")
    error: str | None = Field(description="what made the job fail")
    version: int = Field(description="the newest published version, 0 before the first round")
    rounds_total: int
    epoch: int
    loss: float | None = Field(description="training loss of the newest version's round")
    accuracy: float | None = Field(description="fraction of the test set, of the version scored last")
    scored_version: int | None
    best_version: int | None
    best_accuracy: float | None
    durable_version: int = Field(description="this version survives the loss of power; 0 needs no file")
    weights_sha256: str | None
    parameters: int | None
    forked_from: ForkedFrom | None = Field(description="none for a job that started from its seed")
    chosen: str | None = Field(description="why it has the codecs that were chosen for it, where it left them open")
    samples_per_s: float = Field(
        description="of the versions of the last ten seconds, or of the newest one where they take longer; 0 when none "
        "comes for three times as long as usual (at least ten seconds), or the job does not run"
    )
    workers: int = Field(description="workers taking part now")
    reducer: ReducerPublic | None
    accepted: int
    stale: int
    duplicate: int
    lease_lost: int
    fenced: int
    refused: int
    reassigned: int
    residual_resets: int = Field(
        description="how often a worker joined in mid-job, owing nothing of updates before: codecs with error feedback"
    )
    bytes_up: int
    bytes_down: int
    created_at: Instant
    started_at: Instant | None
    finished_at: Instant | None
    paused_at: Instant | None = Field(description="none unless the job is paused")
    pause_after: int | None = Field(description="the version after which it will pause, as a user asked")
    resume_at: Instant | None = Field(description="when a pause ends by itself, if a user said so")
    stopped_s: float = Field(description="how long it was paused, or had failed before a retry; not what lasts")
    left_s: float | None = Field(description="until the last version at the present speed; none while nothing moves")
    updated_at: Instant
    last_event_id: int = Field(description="give it as Last-Event-ID (or ?after=) to /events to get what comes next")


class JobPage(_Answer):
    """A page of jobs, in the requested order."""

    items: list[JobPublic]
    next_cursor: str | None


class SecondsPublic(_Answer):
    """A worker's time for one submission, by activity."""

    waiting: float
    computing: float
    encoding: float
    uploading: float


class SubmissionPublic(_Answer):
    """A worker's submission and its outcome."""

    id: int
    at: Instant
    worker: str
    nonce: str
    outcome: Outcome
    reason: str | None
    base_version: int | None
    current_version: int | None
    base: str | None = Field(description="token of the version it was computed on")
    current: str | None = Field(description="token of the version that was current when it came")
    micro_batches: list[int]
    samples: int
    bytes_up: int
    bytes_down: int
    seconds: SecondsPublic
    voided: bool = Field(description="computed on a version that a restore has undone")


class SubmissionPage(_Answer):
    """Submissions, newest first."""

    items: list[SubmissionPublic]
    next_cursor: str | None
    folded: int = Field(
        0, description="the job's submissions that are counted, but not listed: they came while no control plane ran"
    )


class EstimatePublic(_Answer):
    """The speed of a job with one more worker, as a multiple of its present speed; or why there is no estimate."""

    low: float | None = Field(None, description="with a worker as slow as the slowest")
    likely: float | None = Field(None, description="with one as fast as half of them")
    high: float | None = Field(None, description="with one as fast as the fastest")
    reason: str | None = None


class EpochPublic(_Answer):
    """How often each sample of an epoch counted; every number is in samples."""

    epoch: int
    samples: int = Field(description="of the rounds done so far; all of them once the epoch is done")
    counted: int = Field(description="above `samples` only if something counted twice")
    missing: int
    reassigned: int = Field(description="leased again because a worker was slow or gone")
    duplicates_refused: int = Field(description="sent again and not counted again")


class LedgerPublic(_Answer):
    epochs: list[EpochPublic]


class PowerPublic(_Answer):
    """A machine's power supply, as far as it is known."""

    plugged: bool | None
    percent: float | None = Field(description="of the battery; null where there is none")


class WorkerPublic(_Answer):
    """A worker; for a worker that is offline, as last seen."""

    id: str
    online: bool
    name: str
    device: str
    queues: list[str]
    host: str
    pid: int | None
    memory_bytes: int
    max_memory_bytes: int | None = Field(description="what a job may take of the memory, by the wish of its owner")
    versions: dict[str, Any]
    seat: str | None
    job_id: str | None = Field(description="the job it serves now")
    job_share: float | None = Field(description="of all samples counted in that job, 0 to 1")
    share: float = Field(description="of all samples counted in the last hour, 0 to 1")
    samples_per_s: float
    refused: str | None = Field(description="why it gets no seats: its version is another; what to do")
    drained: bool = Field(description="gets no seat until a user undrains it")
    leaving: bool = Field(description="was asked to leave for good, and has not yet")
    first_seen: Instant
    resting: str | None = Field(description="why it takes no seats just now, by the wish of its owner")
    power: PowerPublic
    left_out: list[str] = Field(description="why it gets no seat in which of the jobs that want workers")
    last_seen: Instant


class WorkerList(_Answer):
    items: list[WorkerPublic]


class JobWorkerPublic(_Answer):
    """A worker's contribution to a job."""

    id: str
    name: str
    device: str
    kinds: list[Kind] = Field(
        description="what its bits depend on: one, unless it joined again as another; newest last"
    )
    active: bool = Field(description="takes part now")
    left_reason: str | None
    samples_per_s: float
    samples: int = Field(description="counted for this worker")
    share: float = Field(description="of all counted samples, 0 to 1")
    accepted: int
    stale: int
    duplicate: int
    lease_lost: int
    fenced: int
    refused: int
    refused_reason: str | None
    strikes: int = Field(description="refused updates that count towards a ban")
    banned: str | None = Field(description="why it may not take part any more, until somebody lifts the ban")
    unfit: str | None = Field(description="why its machine cannot take part, by its own word: a failed self-test")
    memory_bytes: int | None = Field(
        description="the most its seat has taken of what its device computes with; an estimate before its first unit"
    )
    bytes_up: int
    bytes_down: int
    joined_at: Instant | None
    left_at: Instant | None
    last_seen: Instant


class JobWorkerList(_Answer):
    items: list[JobWorkerPublic]


class QueuedJobPublic(_Answer):
    """A job that wants workers of a queue."""

    id: str
    title: str
    status: JobStatus
    priority: int
    wanted: int = Field(description="workers it can use at a time")
    held: int = Field(description="workers that were given to it")


class QueuePublic(_Answer):
    """A queue that has workers or unfinished jobs."""

    name: str
    workers: int = Field(description="online and serving it")
    queued: int
    running: int
    jobs: list[QueuedJobPublic] = Field(description="queued and running ones in the order in which they are served")


class QueueList(_Answer):
    items: list[QueuePublic]


class InviteRequest(BaseModel):
    """The queue that the invited worker is to serve, and the invite's lifetime."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queue: str = Field("default", pattern=QUEUE_PATTERN)
    minutes: int = Field(15, ge=1, le=1440)


class InvitePublic(_Answer):
    """An invite: a link that admits one worker, once."""

    id: str
    queue: str
    status: Literal["pending", "taken", "joined", "expired"] = Field(
        description="taken: the machine has the broker's address; joined: it was heard of on the queue since"
    )
    worker: str | None = Field(description="what the machine that took it up calls itself")
    created_at: Instant
    expires_at: Instant


class InviteCreated(InvitePublic):
    """A new invite with its link; later answers do not contain the link."""

    url: str
    command: str = Field(description="to be typed on the machine that is helping")
    qr: str = Field(description="the link as a QR code: an SVG image as data URI")
    note: str | None = Field(description="what keeps other machines from joining, if anything does")


class InviteList(_Answer):
    items: list[InvitePublic]


class JoinRequest(BaseModel):
    """A worker's name and key, sent to take up an invite."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    key: str | None = Field(
        None, min_length=16, max_length=200, description="made up by the machine: with it a lost answer is given again"
    )


class Admission(_Answer):
    """The broker's address and the queue for an invited worker."""

    redis_url: str
    queue: str


class VersionPublic(_Answer):
    """A version that stands, and the updates it was made of."""

    version: int
    token: str | None = Field(description="none where its record was lost")
    sha256: str | None = Field(description="over its weights; none where its record was lost")
    loss: float | None
    counted: list[tuple[int, str, int]] = Field(
        description="unit of work (a micro-batch; for strategy local a replica's), worker and samples, in their order"
    )
    staleness: list[int] = Field(
        description="how many versions before its base each was computed on; empty where none was late"
    )


class VersionPage(_Answer):
    """Versions, ascending."""

    items: list[VersionPublic]
    next_since: int | None = Field(description="give it as `since` for the next page; none on the last one")


class CheckpointPublic(_Answer):
    """A version whose weights can be downloaded."""

    version: int
    token: str
    sha256: str
    bytes: int
    at: Instant
    accuracy: float | None
    loss: float | None
    best: bool
    url: str


class CheckpointList(_Answer):
    items: list[CheckpointPublic]


class Point(_Answer):
    """A value of a series."""

    version: int
    value: float
    at: Instant


class Metrics(_Answer):
    """Series by version, ascending."""

    train_loss: list[Point]
    test_loss: list[Point]
    test_accuracy: list[Point]
    samples_per_s: list[Point]
    bytes_up: list[Point] = Field(description="of all workers, per version")
    bytes_down: list[Point] = Field(description="of all workers, per version")
    staleness: list[Point] = Field(
        description="how many versions late its updates were, on average; empty unless the strategy takes late ones"
    )


class EventPublic(_Answer):
    """An entry of the job's timeline."""

    id: int
    type: str
    at: Instant
    data: dict[str, Any]


class LogLinePublic(_Answer):
    """A line of a job's log; lines are in the order in which the broker received them."""

    id: int
    at: Instant = Field(description="by the clock of whoever wrote it")
    worker: str = Field(description="the worker's id, `reducer` or `evaluator`: as the sender says")
    name: str = Field(description="of the worker, or the host of the others")
    level: Level
    text: str
    data: dict[str, Any] = Field(description="what else is said, by name; `exception` is a traceback")


class LogPage(_Answer):
    """Lines of a job's log, ascending."""

    items: list[LogLinePublic]
    previous: int | None = Field(
        description="give it as `before` for the lines before these; none where there are none, and with `after`"
    )


class ProblemPublic(_Answer):
    """An error (RFC 9457); `errors` names the fields that are wrong."""

    type: str
    title: str
    status: int
    detail: str | None = None
    errors: list[dict[str, str]] | None = None


def _documented(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/problem+json": {"schema": ProblemPublic.model_json_schema()}}}


PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: _documented(text)
    for code, text in {
        400: "the Host header names another server, or the body cannot be read",
        401: "no token, or a wrong one",
        403: "asked from another site's page",
        404: "there is no such thing",
        409: "the job's status forbids it",
        413: "the body is too large",
        422: "the request is not valid",
        429: "too many wrong keys or codes from this address: try again after Retry-After seconds",
        431: "too many headers, or too large ones",
        503: "the broker or the database cannot be used now: try again after Retry-After seconds",
    }.items()
}
"""Error answers that every route may give, for the OpenAPI document."""
PROBLEMS[401]["content"]["text/html"] = {}  # for browsers: where the login link is


class Health(_Answer):
    status: str


class DependencyPublic(_Answer):
    """A dependency of the control plane: whether it works, and its error if not."""

    ok: bool
    detail: str


class Readiness(_Answer):
    """The control plane is ready if every dependency is."""

    status: str
    dependencies: dict[str, DependencyPublic]


class Release(_Answer):
    """The package's version, and the protocol that it speaks with workers."""

    version: str
    protocol: int
