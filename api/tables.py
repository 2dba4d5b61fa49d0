"""The SQLite tables. Times are integers, milliseconds since the epoch by the clock of whoever wrote the event.

Rows about a version are keyed by (job, token): a job that went on from a checkpoint writes new rows under its new
incarnation, and the rows of the lost branch are `voided`, never deleted.
"""

from typing import Any, cast

from sqlalchemy import JSON, BigInteger, Column, Index, LargeBinary, Table, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from computeshare.types import JobStatus

Millis = BigInteger
ACTIVE: tuple[JobStatus, ...] = ("queued", "running")
"""The statuses in which a job wants workers."""


def table(model: type[SQLModel]) -> Table:
    """The table of a model, for statements that go without objects."""
    return cast(Table, model.__table__)  # type: ignore[attr-defined]


def priority_of(spec: dict[str, Any]) -> int:
    """A job's priority by its JobSpec's document; 0 for a job of an earlier release."""
    return int(spec.get("priority", 0))


def _json() -> Any:
    return Field(default=None, sa_column=Column(JSON(none_as_null=True)))


def _job() -> Any:
    return Field(foreign_key="job.id", ondelete="CASCADE", primary_key=True)


class Job(SQLModel, table=True):
    """One job: its specification, its status, and projections of its events."""

    __table_args__ = (Index("ix_job_newest", "created_ms", "id"),)

    id: str = Field(primary_key=True, max_length=8)
    name: str
    queue: str = Field(index=True)
    status: str = Field(index=True)
    reason: str | None = None
    error: str | None = None
    spec: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    rounds_total: int
    created_ms: int = Field(sa_type=Millis)
    started_ms: int | None = Field(default=None, sa_type=Millis)
    finished_ms: int | None = Field(default=None, sa_type=Millis)
    paused_ms: int | None = Field(default=None, sa_type=Millis)
    pause_after: int | None = None
    """The version after which it pauses, as a user asked."""
    resume_ms: int | None = Field(default=None, sa_type=Millis)
    """When a pause ends by itself, if a user said so."""
    stopped_ms: int = Field(default=0, sa_type=BigInteger)
    """For how long it was paused, or had failed before it was tried again; what lasts is not in it yet."""
    updated_ms: int = Field(sa_type=Millis)
    purged_ms: int | None = Field(default=None, sa_type=Millis)

    token: str | None = None
    incarnation: int = 0
    version: int = 0
    epoch: int = 0
    loss: float | None = None
    accuracy: float | None = None
    scored_version: int | None = None
    best_version: int | None = None
    best_accuracy: float | None = None
    durable_version: int = 0
    weights_sha256: str | None = None
    parameters: int | None = None
    samples_per_s: float = 0.0
    reducer_host: str | None = None
    reducer_pid: int | None = None
    reducer_kind: dict[str, Any] | None = _json()
    """The kind of machine that published the first weights of this incarnation."""
    forked_from: dict[str, Any] | None = _json()
    """`job_id`, `version` and `sha256` of what the job started from, whether its `optimizer` was `kept` or is `fresh`,
    and the `token` of the checkpoint that holds it among the job's own."""

    chosen: str | None = None
    """Why the job has the codecs that were chosen for it, where it left them open."""

    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    lease_lost: int = 0
    fenced: int = 0
    refused: int = 0
    reassigned: int = 0
    residual_resets: int = 0
    bytes_up: int = Field(default=0, sa_type=BigInteger)
    bytes_down: int = Field(default=0, sa_type=BigInteger)
    folded: int = 0
    """Submissions among those above that have no row of their own: they were folded into counts on their way."""

    stream_id: str = "0-0"
    """The last event taken from the job's Redis stream."""
    revision: int = 0
    """Grows with every change of this row, so that a stream of snapshots sends only what changed."""

    @property
    def title(self) -> str:
        """What the job is called."""
        return self.name or f"{self.spec['model']} on {self.spec['dataset']}"

    @property
    def priority(self) -> int:
        """Higher-priority jobs get workers first."""
        return priority_of(self.spec)


class IdempotencyKey(SQLModel, table=True):
    """A client's `Idempotency-Key`: the job it made; it outlives the job, so that a late repeat makes no second one."""

    __tablename__ = "idempotency_key"

    key: str = Field(primary_key=True, max_length=255)
    fingerprint: str
    """sha256 of the request's body."""
    job_id: str
    created_ms: int = Field(sa_type=Millis)


class Outbox(SQLModel, table=True):
    """What is still to be done outside SQLite, written in the transaction that decided it."""

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
    """One worker's participation in one job, as decided here; RQ runs it."""

    __tablename__ = "seat"
    __table_args__ = (Index("ix_seat_active", "ended_ms", "job_id"),)

    id: str = Field(primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE", index=True)
    worker: str
    number: int
    attempt: int
    state: str
    """`pending` (not handed over yet), `issued`, then one of `finished`, `left`, `failed`, `lost`, `stopped`."""
    created_ms: int = Field(sa_type=Millis)
    ended_ms: int | None = Field(default=None, sa_type=Millis)
    leaving_ms: int | None = Field(default=None, sa_type=Millis)
    """Since when its worker is asked to leave."""
    left_to: str | None = None
    """The job that it is to leave for; none where it is to rest."""


class Invite(SQLModel, table=True):
    """A link that lets one worker in, once."""

    id: str = Field(primary_key=True, max_length=8)
    digest: str = Field(index=True, unique=True)
    """sha256 of its code, which is nowhere else."""
    queue: str
    created_ms: int = Field(sa_type=Millis)
    expires_ms: int = Field(sa_type=Millis)
    used_ms: int | None = Field(default=None, sa_type=Millis)
    worker: str | None = None
    """What the machine that took it up calls itself."""
    key: str | None = None
    """sha256 of what that machine alone knows: whoever says it gets the same answer again."""


class VersionRow(SQLModel, table=True):
    """A committed version. `bytes_up` and `bytes_down` are the job's totals at that moment."""

    __tablename__ = "version"
    __table_args__ = (Index("ix_version_series", "job_id", "version"),)

    job_id: str = _job()
    token: str = Field(primary_key=True)
    incarnation: int
    version: int
    epoch: int
    loss: float | None = None
    sha256: str | None = None
    samples: int
    samples_per_s: float
    bytes_up: int = Field(sa_type=BigInteger)
    bytes_down: int = Field(sa_type=BigInteger)
    seconds: dict[str, float] | None = _json()
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


class LedgerEntry(SQLModel, table=True):
    """One micro-batch counted in one version: a second row for the same micro-batch would show a double count."""

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
    """How many versions before the base it was computed on."""


class Archive(SQLModel, table=True):
    """The rows of `version` and `ledger_entry` of some versions that are old, packed."""

    __tablename__ = "archive"

    job_id: str = _job()
    first: int = Field(primary_key=True)
    """Its versions are from this one to `last`."""
    last: int
    ends: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """By incarnation, the last version that stands and the first that is voided."""
    samples: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    """By worker, samples that count."""
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class EpochStat(SQLModel, table=True):
    """What happened to an epoch's samples besides being counted."""

    __tablename__ = "epoch_stat"

    job_id: str = _job()
    epoch: int = Field(primary_key=True)
    reassigned: int = 0
    duplicates_refused: int = 0
    counted: int = 0
    """Samples in the ledger, as often as they stand there."""
    covered: int = 0
    """Samples that stand in the ledger at least once."""


class Submission(SQLModel, table=True):
    """One message of a worker and what became of it."""

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
    """Samples of the micro-batches that were received (`counted` of the event)."""
    bytes_up: int = Field(sa_type=BigInteger)
    bytes_down: int = Field(sa_type=BigInteger)
    waiting_s: float
    computing_s: float
    encoding_s: float
    uploading_s: float
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


class CheckpointRow(SQLModel, table=True):
    """A version that is whole on disk; its files lie in `artifacts/JOB/TOKEN/`."""

    __tablename__ = "checkpoint"
    __table_args__ = (Index("ix_checkpoint_version", "job_id", "version"),)

    job_id: str = _job()
    token: str = Field(primary_key=True)
    incarnation: int
    version: int
    sha256: str
    bytes: int = Field(sa_type=BigInteger)
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


class Score(SQLModel, table=True):
    """A version's loss and accuracy on the test set."""

    __table_args__ = (Index("ix_score_version", "job_id", "version"),)

    job_id: str = _job()
    token: str = Field(primary_key=True)
    incarnation: int
    version: int
    loss: float | None
    accuracy: float
    samples: int
    at_ms: int = Field(sa_type=Millis)
    voided: bool = False


TELLING = text("type NOT IN ('version', 'folded')")
"""Of the timeline all but what a long job has very many of; its index says so in the same words."""


class Event(SQLModel, table=True):
    """The job's timeline; `id` is the id of the event sent to browsers. Submissions have their own table."""

    __table_args__ = (
        UniqueConstraint("job_id", "stream_id"),
        Index("ix_event_job", "job_id", "id"),
        Index("ix_event_telling", "job_id", "id", sqlite_where=TELLING),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    stream_id: str | None = None
    """Its id in the Redis stream; none for what the control plane itself did."""
    type: str
    at_ms: int = Field(sa_type=Millis)
    data: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class WorkerStat(SQLModel, table=True):
    """A worker's part in a job; the row stays when the worker leaves."""

    __tablename__ = "worker_stat"
    __table_args__ = (Index("ix_worker_stat_samples", "worker", "samples"),)

    job_id: str = _job()
    worker: str = Field(primary_key=True)
    name: str = ""
    device: str = ""
    kinds: list[dict[str, Any]] | None = _json()
    """The kinds of machine it has been in this job, the newest last; one, unless it was changed in between."""
    session: str | None = None
    seat: str | None = None
    joined_ms: int | None = Field(default=None, sa_type=Millis)
    left_ms: int | None = Field(default=None, sa_type=Millis)
    left_reason: str | None = None
    seen_ms: int = Field(default=0, sa_type=Millis)
    samples: int = 0
    """Samples counted for this worker in versions that stand."""
    samples_per_s: float = 0.0
    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    lease_lost: int = 0
    fenced: int = 0
    refused: int = 0
    refused_reason: str | None = None
    strikes: int = 0
    banned: str | None = None
    """Why it may not take part any more, until a user lifts that; none for a worker that may."""
    unfit: str | None = None
    """Why its machine cannot take part, by its own word: it gets no seat in the job."""
    memory_bytes: int | None = Field(default=None, sa_type=BigInteger)
    """The most that its seat has taken of what its device computes with; before its first unit, an estimate."""
    bytes_up: int = Field(default=0, sa_type=BigInteger)
    bytes_down: int = Field(default=0, sa_type=BigInteger)


class LogLine(SQLModel, table=True):
    """A line of a job's log: what a worker's seat, the reducer or the evaluator said of the job."""

    __tablename__ = "log_line"
    __table_args__ = (
        UniqueConstraint("job_id", "stream_id"),
        Index("ix_log_line_job", "job_id", "id"),
        {"sqlite_autoincrement": True},
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    stream_id: str
    """Its id in the Redis stream, and a checksum of what it says: a broker that lost some gives ids again."""
    at_ms: int = Field(sa_type=Millis)
    worker: str
    name: str
    level: str
    text: str
    data: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class Webhook(SQLModel, table=True):
    """Who is told of what happens: an address, the events it wants, and perhaps of which job or queue only."""

    id: str = Field(primary_key=True, max_length=8)
    url: str
    secret: str
    """Signs what is sent; shown once, to whoever created the webhook."""
    events: list[str] = Field(sa_column=Column(JSON, nullable=False))
    job_id: str | None = None
    """No foreign key: what is still to be delivered outlives a job."""
    queue: str | None = None
    active: bool = True
    trouble: str | None = None
    """Why it was switched off, or what was wrong with the last attempt; none after one that went well."""
    event_id: int
    """The timeline up to here has been looked through."""
    created_ms: int = Field(sa_type=Millis)


class Delivery(SQLModel, table=True):
    """One notification to one webhook: what is sent, and every attempt to send it."""

    __table_args__ = (
        Index("ix_delivery_due", "state", "due_ms"),
        Index("ix_delivery_log", "webhook_id", "number"),
        {"sqlite_autoincrement": True},
    )

    number: int | None = Field(default=None, primary_key=True)
    id: str = Field(unique=True)
    """The header `webhook-id`: the same however often it is sent."""
    webhook_id: str = Field(foreign_key="webhook.id", ondelete="CASCADE")
    event: str
    job_id: str | None = None
    body: str
    state: str
    """`pending`, then `delivered`, `failed` (given up) or `dropped` (too many waited, or it was switched off)."""
    tries: int = 0
    """Attempts since it was last asked for."""
    attempts: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    created_ms: int = Field(sa_type=Millis)
    due_ms: int = Field(sa_type=Millis)


class Machine(SQLModel, table=True):
    """A worker that was seen: one row for each process that is there, and for the last one of a machine that is not.

    A process that comes after another of the same host and name has gone takes over that one's row. The times
    of being seen are the broker's.
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
    """When this process was first seen; later than `first_seen_ms` where it came after another."""
    last_seen_ms: int = Field(sa_type=Millis)
    noted_ms: int = Field(sa_type=Millis)
    """When that was last written down, by the control plane's clock."""
    drained_ms: int | None = Field(default=None, sa_type=Millis)
    """Since when it gets no seat, on a user's word."""
    dismissed_ms: int | None = Field(default=None, sa_type=Millis)
    """Since when it is asked to leave for good; the row stays, for it may be back before it has heard of that."""
    tallies: list[list[int]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """`[time, samples counted for it by then]`, every few minutes of the last hour, oldest first."""
