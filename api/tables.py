"""The SQLite tables. Times are integers: milliseconds since the epoch by the clock of the process that sent the event.

Rows about a version are keyed by (job, token): a job restored from a checkpoint writes new rows under its new
incarnation, and the rows of the abandoned branch are marked `voided`, never deleted.
"""

from typing import Any, Literal, cast

from sqlalchemy import JSON, BigInteger, Column, Index, LargeBinary, Table, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from computeshare.jobspec.tasks.stored import subject_of
from computeshare.types import JobStatus

Millis = BigInteger
ACTIVE: tuple[JobStatus, ...] = ("queued", "running")
"""The statuses in which a job wants workers."""
ReasonCode = Literal[
    "looking",  # for workers, since a moment ago
    "workers",  # too few serve the queue
    "busy",  # other jobs have them
    "unreadable",  # this release cannot read the specification
    "worker",  # a single one cannot take part
    "reducer",
    "opening",
    "loading",
    "stages",  # its workers cannot hold all stages of the model
    "broker",
    "memory",
    "evaluator",
    "scoring",
    "finishing",
    "user",  # paused by a user
    "disk",  # paused because no checkpoint can be written
]
"""Why a job does not advance."""
PAUSED: tuple[ReasonCode, ...] = ("user", "disk")
"""The codes of paused jobs."""


def table(model: type[SQLModel]) -> Table:
    """The SQLAlchemy table of a model, for statements without the object-relational mapper."""
    return cast(Table, model.__table__)  # type: ignore[attr-defined]


def _json() -> Any:
    return Field(default=None, sa_column=Column(JSON(none_as_null=True)))


def _job() -> Any:
    return Field(foreign_key="job.id", ondelete="CASCADE", primary_key=True)


class _OfVersion(SQLModel):
    """Columns of a row about one version."""

    job_id: str = _job()
    token: str = Field(primary_key=True)
    incarnation: int
    version: int
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


class _Traffic(SQLModel):
    """Counts of submissions by outcome, and bytes."""

    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    lease_lost: int = 0
    fenced: int = 0
    refused: int = 0
    bytes_up: int = Field(default=0, sa_type=BigInteger)
    bytes_down: int = Field(default=0, sa_type=BigInteger)


class Job(_Traffic, table=True):
    """A job: its specification, its status, and totals computed from its events."""

    __table_args__ = (Index("ix_job_newest", "created_ms", "id"),)

    id: str = Field(primary_key=True, max_length=8)
    name: str
    queue: str = Field(index=True)
    status: str = Field(index=True)
    reason: str | None = None
    reason_code: str | None = None
    """A `ReasonCode`; it is that of `reason` while the job wants workers and has one, or is paused."""
    missing_workers: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    """How many more workers a job of the code `workers` needs."""
    error: str | None = None
    spec: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    rounds_total: int
    created_ms: int = Field(sa_type=Millis)
    started_ms: int | None = Field(default=None, sa_type=Millis)
    finished_ms: int | None = Field(default=None, sa_type=Millis)
    paused_ms: int | None = Field(default=None, sa_type=Millis)
    pause_after: int | None = None
    """The version after which the job pauses, on a user's request."""
    pause_by: str | None = None
    """Who planned that pause."""
    resume_ms: int | None = Field(default=None, sa_type=Millis)
    """When the pause ends by itself, if a user set a time."""
    stopped_ms: int = Field(default=0, sa_type=BigInteger)
    """Total time since the job's start that it was paused, or failed before a retry; a present pause is added when
    it ends."""
    updated_ms: int = Field(sa_type=Millis)
    purged_ms: int | None = Field(default=None, sa_type=Millis)

    token: str | None = None
    incarnation: int = 0
    version: int = 0
    epoch: int = 0
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None
    scored_version: int | None = None
    best_version: int | None = None
    best_accuracy: float | None = None
    best_loss: float | None = None
    """The test loss of the best version, not always the lowest."""
    tested: dict[str, Any] | None = _json()
    """For a job with a validation split: `Score.tested` of the best version, once the job is at its end."""
    tested_last: dict[str, Any] | None = _json()
    """As `tested`, of the version scored last."""
    own_metrics: dict[str, Any] | None = _json()
    """`Score.own_metrics` of the version scored last."""
    durable_version: int = 0
    weights_sha256: str | None = None
    parameters: int | None = None
    samples_per_s: float = 0.0
    reducer_host: str | None = None
    reducer_pid: int | None = None
    reducer_kind: dict[str, Any] | None = _json()
    """The kind of machine that published the first weights of this incarnation."""
    forked_from: dict[str, Any] | None = _json()
    """The parent's `job_id`, `version` and `sha256`; `optimizer`: whether its state was `kept` or is `fresh`;
    `token`: the job's own checkpoint that holds the parent's weights."""

    chosen: str | None = None
    """Why the job got its codecs, where its specification left the choice open (codec `auto`)."""

    stages: dict[str, Any] | None = _json()
    """Where the model is spread over workers: the layers and parameters of each of the `stages`, the `chains` of
    workers with the stages that each holds, and how busy these `workers` are."""

    reassigned: int = 0
    residual_resets: int = 0
    audited: int = 0
    confirmed: int = 0
    """Of the audited updates, those that a second machine computed to the same bits."""
    folded: int = 0
    """Submissions that the counts by outcome include and that have no row: the reducer summed them up (`fold.lua`)
    because too many came while no control plane stored them."""

    stream_id: str = "0-0"
    """The last event taken from the job's Redis stream."""
    revision: int = 0
    """Grows with every change of this row, so that a stream sends a snapshot only after a change."""

    @property
    def title(self) -> str:
        """The job's name, or `MODEL on DATASET` where it has none."""
        return self.name or subject_of(self.spec)

    @property
    def priority(self) -> int:
        """Higher-priority jobs get workers first; 0 for a job of an earlier release."""
        return int(self.spec.get("priority", 0))


class IdempotencyKey(SQLModel, table=True):
    """A client's `Idempotency-Key` and the job created with it. The row outlives the job, so that a late repetition of
    the request creates no second job.
    """

    __tablename__ = "idempotency_key"

    key: str = Field(primary_key=True, max_length=255)
    fingerprint: str
    """sha256 of the request's body."""
    job_id: str
    created_ms: int = Field(sa_type=Millis)


class Outbox(SQLModel, table=True):
    """A pending action outside SQLite (in Redis or on disk), written in the transaction that decided it."""

    __table_args__ = (Index("ix_outbox_due", "done_ms", "due_ms"),)

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(index=True)
    kind: str
    """`seat`, `stop`, `pause`, `resume`, `end`, `retry`, `unban` or `purge`."""
    payload: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    created_ms: int = Field(sa_type=Millis)
    due_ms: int = Field(sa_type=Millis)
    done_ms: int | None = Field(default=None, sa_type=Millis)


class SeatRow(SQLModel, table=True):
    """A seat: one worker's participation in one job, as the scheduler decided. RQ runs it as a job of its own."""

    __tablename__ = "seat"
    __table_args__ = (Index("ix_seat_active", "ended_ms", "job_id"),)

    id: str = Field(primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE", index=True)
    worker: str
    number: int
    attempt: int
    state: str
    """`pending` (not given to RQ yet), `issued`, then `finished`, `left`, `failed`, `lost` or `stopped`."""
    created_ms: int = Field(sa_type=Millis)
    ended_ms: int | None = Field(default=None, sa_type=Millis)
    leaving_ms: int | None = Field(default=None, sa_type=Millis)
    """When the worker was first asked to leave this seat."""
    left_to: str | None = None
    """The job that the worker is moved to; None: the worker is to rest."""


class Invite(SQLModel, table=True):
    """An invite: a link that admits one worker, once."""

    id: str = Field(primary_key=True, max_length=8)
    digest: str = Field(index=True, unique=True)
    """sha256 of the link's code; the code itself is not stored."""
    queue: str
    created_ms: int = Field(sa_type=Millis)
    expires_ms: int = Field(sa_type=Millis)
    used_ms: int | None = Field(default=None, sa_type=Millis)
    worker: str | None = None
    """The name that the machine gave when it took the invite up."""
    public_key: str | None = None
    """That machine's Ed25519 key, in hex: a repeated request with the same key gets the same answer."""
    gateway: bool = False
    """Whether the machine joined through the gateway, where it proves by that key who it is."""
    access_ends_ms: int | None = Field(default=None, sa_type=Millis)
    """When the gateway begins to refuse the machine; None: once this row is deleted."""
    person: str | None = None
    """For whom it was made; None: it does not say."""


class AccessToken(SQLModel, table=True):
    """A token that was made for somebody. Its text and what derives from it are stored as sha256 digests only."""

    __tablename__ = "access_token"

    id: str = Field(primary_key=True, max_length=8)
    name: str
    digest: str = Field(unique=True)
    login_digest: str = Field(unique=True)
    """Of the key of its login link."""
    cookie_digest: str = Field(unique=True)
    """Of the cookie of browsers that logged in with it."""
    scopes: list[str] = Field(sa_column=Column(JSON, nullable=False))
    created_ms: int = Field(sa_type=Millis)
    created_by: str
    expires_ms: int | None = Field(default=None, sa_type=Millis)
    used_ms: int | None = Field(default=None, sa_type=Millis)


class ShareLink(SQLModel, table=True):
    """A link that shows one job's page to whoever has it."""

    __tablename__ = "share_link"

    id: str = Field(primary_key=True, max_length=8)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE", index=True)
    digest: str = Field(unique=True)
    """sha256 of the link's code; the code itself is not stored."""
    created_ms: int = Field(sa_type=Millis)
    created_by: str
    expires_ms: int | None = Field(default=None, sa_type=Millis)
    used_ms: int | None = Field(default=None, sa_type=Millis)


class AuditRow(SQLModel, table=True):
    """Who did what: written in the transaction of the change."""

    __tablename__ = "audit"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: int | None = Field(default=None, primary_key=True)
    at_ms: int = Field(sa_type=Millis, index=True)
    actor: str
    token_id: str
    """Empty for the owner's token. No foreign key: entries outlive tokens."""
    address: str
    action: str
    subject: str
    detail: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class VersionRow(_OfVersion, table=True):
    """A committed version. `bytes_up` and `bytes_down` are the job's totals at that moment."""

    __tablename__ = "version"
    __table_args__ = (Index("ix_version_series", "job_id", "version"),)

    epoch: int
    loss: float | None = None
    sha256: str | None = None
    samples: int
    samples_per_s: float
    bytes_up: int = Field(sa_type=BigInteger)
    bytes_down: int = Field(sa_type=BigInteger)
    seconds: dict[str, float] | None = _json()
    consensus: float | None = None
    """Where workers have weights of their own: the root mean square of their distance from the version's."""


class LedgerEntry(SQLModel, table=True):
    """One micro-batch counted in one version. Two rows for one micro-batch that are not voided would show a double
    count.
    """

    __tablename__ = "ledger_entry"
    __table_args__ = (
        Index("ix_ledger_epoch", "job_id", "epoch", "micro_batch", "voided", "samples"),
        {"sqlite_with_rowid": False},
    )

    job_id: str = _job()
    token: str = Field(primary_key=True)
    micro_batch: int = Field(primary_key=True)
    incarnation: int
    version: int
    epoch: int
    worker: str
    samples: int
    voided: bool = False
    staleness: int = 0
    """The distance from the version it was computed on to the version it was applied to."""


class Archive(SQLModel, table=True):
    """A block of old versions: their rows of `version` and `ledger_entry`, compressed (`api/projection/archive.py`)."""

    __tablename__ = "archive"

    job_id: str = _job()
    first: int = Field(primary_key=True)
    """The block holds versions `first` to `last`."""
    last: int
    ends: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """By incarnation: the last version that stands and the first version that is voided."""
    samples: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """By worker: the samples counted in versions that stand."""
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class EpochStat(SQLModel, table=True):
    """Counts of an epoch's samples: reassigned, refused as duplicates, counted, covered."""

    __tablename__ = "epoch_stat"

    job_id: str = _job()
    epoch: int = Field(primary_key=True)
    reassigned: int = 0
    duplicates_refused: int = 0
    counted: int = 0
    """Samples in the ledger; a sample counted twice adds two."""
    covered: int = 0
    """Samples that are in the ledger at least once."""


class Submission(SQLModel, table=True):
    """A worker's submission and its outcome."""

    __table_args__ = (
        UniqueConstraint("job_id", "stream_id"),
        Index("ix_submission_nonce", "job_id", "nonce"),
        Index("ix_submission_job", "job_id"),
        Index("ix_submission_other", "job_id", "outcome", "id", sqlite_where=text("outcome != 'accepted'")),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    stream_id: str
    worker: str
    nonce: str
    outcome: str
    reason: str | None = None
    base: str | None = None
    base_version: int | None = None
    current: str | None = None
    current_version: int | None = None
    micro_batches: list[int] = Field(sa_column=Column(JSON, nullable=False))
    samples: int
    """Samples of the micro-batches received (`counted` in the event)."""
    bytes_up: int = Field(sa_type=BigInteger)
    bytes_down: int = Field(sa_type=BigInteger)
    waiting_s: float
    computing_s: float
    encoding_s: float
    uploading_s: float
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


class CheckpointRow(_OfVersion, table=True):
    """A version whose files are complete on disk, in `artifacts/JOB/TOKEN/`."""

    __tablename__ = "checkpoint"
    __table_args__ = (Index("ix_checkpoint_version", "job_id", "version"),)

    sha256: str
    bytes: int = Field(sa_type=BigInteger)


class Score(_OfVersion, table=True):
    """A version's loss and accuracy on the test set, or on the job's validation split; language models have no
    accuracy.
    """

    __table_args__ = (Index("ix_score_version", "job_id", "version"),)

    loss: float | None
    accuracy: float | None
    samples: int
    tested: dict[str, Any] | None = _json()
    """The `version`, `loss`, `accuracy`, `samples` and `own_metrics` on the test set, where the score is on the
    validation split.
    """
    sample: str | None = None
    """A short text by a language model."""
    own_metrics: dict[str, Any] | None = _json()
    """The recipe's own metrics beside the accuracy, by name, on the same split."""


TELLING = text("type NOT IN ('version', 'folded')")
"""The timeline's events without the types of which a long job has very many. The partial index `ix_event_telling`
needs the same text."""


class Event(SQLModel, table=True):
    """An event of a job's timeline; browsers receive it with the same `id`. Submissions have their own table."""

    __table_args__ = (
        UniqueConstraint("job_id", "stream_id"),
        Index("ix_event_job", "job_id", "id"),
        Index("ix_event_telling", "job_id", "id", sqlite_where=TELLING),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    stream_id: str | None = None
    """The event's id in the Redis stream; None: the control plane wrote the event itself."""
    type: str
    at_ms: int = Field(sa_type=Millis)
    data: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class WorkerStat(_Traffic, table=True):
    """A worker's part in a job; the row stays when the worker leaves."""

    __tablename__ = "worker_stat"
    __table_args__ = (Index("ix_worker_stat_samples", "worker", "samples"),)

    job_id: str = _job()
    worker: str = Field(primary_key=True)
    name: str = ""
    device: str = ""
    kinds: list[dict[str, Any]] | None = _json()
    """The worker's machine kinds in this job, newest last: more than one only if the worker joined again with
    another device, library version or thread count."""
    session: str | None = None
    seat: str | None = None
    joined_ms: int | None = Field(default=None, sa_type=Millis)
    left_ms: int | None = Field(default=None, sa_type=Millis)
    left_reason: str | None = None
    seen_ms: int = Field(default=0, sa_type=Millis)
    samples: int = 0
    """Samples counted for this worker in versions that stand."""
    samples_per_s: float = 0.0
    refused_reason: str | None = None
    strikes: int = 0
    banned: str | None = None
    """Why the worker is banned from the job, until a user lifts the ban; None: not banned."""
    unfit: str | None = None
    """Why the worker gets no seat in the job: its own report that its machine cannot run it."""
    memory_bytes: int | None = Field(default=None, sa_type=BigInteger)
    """Peak memory of the seat on its device; an estimate until the first work unit is done."""
    person: str | None = None
    """Whose the machine is, as in its row."""


class Exchange(SQLModel, table=True):
    """How often a worker averaged its own weights with another's, where the strategy has peers."""

    job_id: str = _job()
    worker: str = Field(primary_key=True)
    peer: str = Field(primary_key=True)
    """Whose weights it read."""
    count: int = 0
    distance: float | None = None
    """How far the two were apart the last time: the root mean square of the difference of their weights."""


class LogLine(SQLModel, table=True):
    """A line of a job's log, written by a worker's seat, the reducer or the evaluator."""

    __tablename__ = "log_line"
    __table_args__ = (
        UniqueConstraint("job_id", "stream_id"),
        Index("ix_log_line_job", "job_id", "id"),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    stream_id: str
    """The line's id in the Redis stream and a checksum of its content: a broker that lost data assigns ids a second
    time."""
    at_ms: int = Field(sa_type=Millis)
    worker: str
    name: str
    level: str
    text: str
    data: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class Recipe(SQLModel, table=True):
    """A recipe's files, named by their digest."""

    digest: str = Field(primary_key=True)
    name: str = ""
    content: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    """The files as canonical JSON, by path."""
    bytes: int
    created_ms: int = Field(sa_type=Millis)


class Dataset(SQLModel, table=True):
    """A data set that a user added; its files are the bundle's."""

    name: str = Field(primary_key=True, max_length=64)
    bundle: str
    facts: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """A `DatasetFacts`."""
    bytes: int = Field(sa_type=Millis)
    created_ms: int = Field(sa_type=Millis)


class Webhook(SQLModel, table=True):
    """A webhook: an address, the events to notify it of, and an optional restriction to one job or one queue."""

    id: str = Field(primary_key=True, max_length=8)
    url: str
    secret: str
    """The key that signs notifications; only the answer to the request that made it shows it."""
    events: list[str] = Field(sa_column=Column(JSON, nullable=False))
    job_id: str | None = None
    """No foreign key: pending deliveries outlive the job."""
    queue: str | None = None
    active: bool = True
    trouble: str | None = None
    """The error of the last attempt (410 Gone switches the webhook off); None after a success."""
    event_id: int
    """Events up to this id have been turned into deliveries."""
    created_ms: int = Field(sa_type=Millis)


class Delivery(SQLModel, table=True):
    """One notification to one webhook: its body, its state and its newest attempts."""

    __table_args__ = (
        Index("ix_delivery_due", "state", "due_ms"),
        Index("ix_delivery_log", "webhook_id", "number"),
        {"sqlite_autoincrement": True},
    )

    number: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True)
    """The header `webhook-id`, the same in every attempt."""
    webhook_id: str = Field(foreign_key="webhook.id", ondelete="CASCADE")
    event: str
    job_id: str | None = None
    body: str
    state: str
    """`pending`, then `delivered`, `failed` (given up) or `dropped` (too many were pending, or the webhook was
    switched off)."""
    tries: int = 0
    """Attempts since the notification was created, or since a user last asked to send it again."""
    attempts: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    created_ms: int = Field(sa_type=Millis)
    due_ms: int = Field(sa_type=Millis)


class Machine(SQLModel, table=True):
    """A worker process: a row for each process online, and for the last process of each machine that is offline.

    A new process takes over the row of an earlier, gone process with the same host and name. `first_seen_ms`,
    `began_ms` and `last_seen_ms` are by the broker's clock.
    """

    worker: str = Field(primary_key=True)
    name: str
    host: str
    device: str
    memory_bytes: int = Field(sa_type=BigInteger)
    versions: dict[str, str] = Field(sa_column=Column(JSON, nullable=False))
    queues: list[str] = Field(sa_column=Column(JSON, nullable=False))
    first_seen_ms: int = Field(sa_type=Millis)
    began_ms: int = Field(sa_type=Millis)
    """When this process was first seen; later than `first_seen_ms` if it took over the row of an earlier process."""
    last_seen_ms: int = Field(sa_type=Millis)
    noted_ms: int = Field(sa_type=Millis)
    """When the row was last updated, by the control plane's clock."""
    drained_ms: int | None = Field(default=None, sa_type=Millis)
    """When a user drained the worker: it gets no seat since."""
    dismissed_ms: int | None = Field(default=None, sa_type=Millis)
    """When a user removed the worker. The row stays, because the process may reconnect before it has read the order."""
    tallies: list[list[int]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """Pairs `[time, samples counted for the worker by then]`, every few minutes of the last hour, oldest first."""
    person: str | None = None
    """Whose it is: a name; empty: its invite named nobody; None: it came without an invite, and is the owner's."""


JOB, WORKER = table(Job), table(WorkerStat)
