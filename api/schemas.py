"""The schemas of the REST API's answers and requests.

Times are ISO 8601 in UTC, sizes are bytes, durations are seconds.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from api.tables import ReasonCode
from computeshare.jobspec.documents.fields import editable
from computeshare.jobspec.spec import QUEUE_PATTERN
from computeshare.jobspec.tasks.facts import Metric
from computeshare.jobspec.tasks.stored import is_language_model, subject_of
from computeshare.queue.text_requests import HOTTEST, LONGEST_PROMPT, MOST_CHARACTERS
from computeshare.runtime.log_lines import Level
from computeshare.runtime.signatures import PUBLIC_KEY, SIGNATURE
from computeshare.settings import Person
from computeshare.tasks.class_counts import MOST_IN_MATRIX
from computeshare.types import JobStatus, Kind, Outcome


def from_milliseconds(value: object) -> object:
    """Convert milliseconds since the epoch, as in the tables, to a time in UTC; leave other types to pydantic."""
    return datetime.fromtimestamp(value / 1000, UTC) if isinstance(value, int) else value


Instant = Annotated[datetime, BeforeValidator(from_milliseconds)]


ScoredPart = Literal["validation", "test"]


class _Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class ReducerPublic(_Answer):
    """The active reducer: the process that makes the next version."""

    host: str
    pid: int
    kind: Kind | None = Field(description="kind of machine that published the first weights; null if not recorded")


class ForkedFrom(_Answer):
    """The version of another job that a job started from; the other job may have been deleted since."""

    job_id: str
    version: int
    sha256: str
    optimizer: Literal["kept", "fresh"] = Field(description="whether the job also took over the optimizer's state")


class ForkRequest(BaseModel):
    """The version of a job to start a new job from, and the fields of the new job that differ."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=0, lt=2**53)] | Literal["latest", "best"] = "latest"
    spec: dict[str, Any] = Field({}, description="fields of the JobSpec that differ from the parent's")
    optimizer: Literal["kept", "fresh"] | None = Field(
        None,
        description="continue with the optimizer's state? By default yes, if only lr and weight_decay change",
    )


_CHANGES: dict[str, Any] = {
    name: (Annotated[(info.annotation, *info.metadata)] | None, Field(None, description=info.description))
    for name, info in editable("active", "always").items()
}
_Editable: Any = create_model("_Editable", **_CHANGES)


class JobChange(_Editable):
    """Changes of a job: at least one field. Name, notes and tags can always change, other fields until the job ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.changes:
            raise ValueError(f"set at least one of: {', '.join(editable('active', 'always'))}")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """The given fields with their new values."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value is not None}


OwnMetrics = dict[str, float | None]
"""A recipe's own metrics beside the accuracy, by name; null: not a finite number."""


class OnTestSet(_Answer):
    """A version's score on the test set, in a job that compares its versions on a validation split."""

    version: int
    loss: float | None
    accuracy: float | None
    samples: int
    own_metrics: OwnMetrics | None = None


class JobPublic(_Answer):
    """A job as clients see it."""

    id: str
    name: str
    title: str = Field(description="the job's name; if it has none, the model or recipe and the data set")
    queue: str
    priority: int = Field(description="higher-priority jobs get workers first")
    spec: dict[str, Any] = Field(description="the JobSpec with its defaults filled in")
    status: JobStatus
    reason: str | None = Field(description="why the job is not running, and what to do")
    reason_code: ReasonCode | None = Field(
        description="the same for programs, of a job that wants workers: such as `workers` if too few serve its queue, "
        "`busy` if other jobs have them, `unreadable` if this release cannot read its specification; of a paused job: "
        "`user` if somebody paused it, `disk` if no checkpoint can be written; null: it advances, or has ended"
    )
    missing_workers: int = Field(
        description="how many more workers the job needs on its queue; 0: enough are there, or it is not known yet "
        "(`looking`)"
    )
    error: str | None = Field(description="why the job failed")
    version: int = Field(description="newest published version; 0 before the end of the first round")
    rounds_total: int
    epoch: int = Field(description="of the newest version, counted from 0: 0 in the first of `epochs_total` epochs")
    epochs_total: int = Field(description="epochs begun by the last round; a job by `rounds` may end within an epoch")
    loss: float | None = Field(description="training loss of the newest version's round")
    metric: Metric = Field(description="what versions are compared by: their accuracy or their loss")
    accuracy: float | None = Field(
        description="accuracy, 0 to 1, of the version scored last: on the test set, or on the job's validation split; "
        "null unless the model is a classifier"
    )
    test_loss: float | None = Field(description="loss of the same version on the same split, in nats")
    perplexity: float | None = Field(description="of a language model: e to the power of `test_loss`")
    own_metrics: OwnMetrics | None = Field(description="a recipe's own metrics, by name, of the same version and split")
    tested: OnTestSet | None = Field(
        description="score on the test set of `best_version`, at the end of a job with a validation split"
    )
    tested_last: OnTestSet | None = Field(description="the same of the last version, where that is not the best")
    scored_version: int | None
    best_version: int | None
    best_accuracy: float | None
    best_loss: float | None = Field(description="loss on the test set of `best_version`")
    durable_version: int = Field(
        description="newest version with a checkpoint on disk, which survives a power loss; 0: none yet"
    )
    weights_sha256: str | None
    parameters: int | None
    epsilon: float | None = Field(
        description="of the differential privacy of the newest version's training samples, at the job's "
        "`privacy.delta`; null without `privacy`, or above 1000"
    )
    epsilon_total: float | None = Field(description="the same for the job's last version")
    warnings: list[str] = Field(
        default_factory=list,
        description="what could spoil the job, and what to do; in the answer to its creation alone",
    )
    forked_from: ForkedFrom | None = Field(description="null for a job that started from its seed")
    chosen: str | None = Field(description="why its codecs or precision were chosen; null unless one was auto")
    samples_per_s: float = Field(
        description="average over the last ten seconds, or over the newest version if it took longer; 0 if the job "
        "does not run, or no version has come for three times the usual interval (at least ten seconds)"
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
        description="times that a worker joined a running job with an empty residual (codecs topk and lowrank up)"
    )
    audited: int = Field(description="updates that a second machine computed as well, and that were compared")
    confirmed: int = Field(description="audited updates that were the same bits")
    bytes_up: int
    bytes_down: int
    created_at: Instant
    started_at: Instant | None
    finished_at: Instant | None
    paused_at: Instant | None = Field(description="null unless the job is paused")
    pause_after: int | None = Field(
        description="the job will pause after this version, as a user asked; null: no pause is planned"
    )
    resume_at: Instant | None = Field(description="when the job resumes automatically; null: when a user resumes it")
    stopped_s: float = Field(description="seconds paused, or failed before a retry; without the current pause")
    left_s: float | None = Field(
        description="seconds until the last version at the present speed; null while there is no progress"
    )
    updated_at: Instant
    last_event_id: int = Field(
        description="send it as Last-Event-ID (or ?after=) to /events to receive all later events"
    )

    @property
    def subject(self) -> str:
        """The job's model or recipe and its data set, in a few words."""
        return subject_of(self.spec)

    @property
    def is_language_model(self) -> bool:
        return is_language_model(self.spec)

    @property
    def named_metrics(self) -> list[str]:
        """The names of a recipe's own metrics, beside the accuracy by which its versions are compared."""
        found = (self.spec.get("recipe_facts") or {}).get("metrics") or ()
        return [name for name in found if name != "accuracy" or self.metric != "accuracy"]

    @property
    def counts_classes(self) -> bool:
        """Whether versions are scored by class."""
        facts = self.spec.get("recipe_facts")
        return self.metric == "accuracy" and (facts is None or bool(facts.get("classes")))


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
    base: str | None = Field(description="token of the version that the update was computed on")
    current: str | None = Field(description="token of the version that was current when the submission arrived")
    micro_batches: list[int]
    samples: int
    bytes_up: int
    bytes_down: int
    seconds: SecondsPublic
    voided: bool = Field(description="true: computed on a version that a restore from a checkpoint has undone")


class SubmissionPage(_Answer):
    """Submissions, newest first."""

    items: list[SubmissionPublic]
    next_cursor: str | None
    folded: int = Field(
        0, description="submissions that are counted but not listed, because they arrived while no control plane ran"
    )


class EstimatePublic(_Answer):
    """The speed of a job with one more worker, as a multiple of its present speed; or why there is no estimate."""

    low: float | None = Field(None, description="if the new worker is as slow as the slowest worker")
    likely: float | None = Field(None, description="if the new worker has the workers' median speed")
    high: float | None = Field(None, description="if the new worker is as fast as the fastest worker")
    reason: str | None = None


class EpochPublic(_Answer):
    """How often each sample of an epoch counted; every number is in samples."""

    epoch: int
    samples: int = Field(description="samples in the rounds finished so far; at the end, in the whole epoch")
    counted: int = Field(description="greater than `samples` only if a sample counted twice")
    missing: int
    reassigned: int = Field(description="leased again because a worker was slow or had left")
    duplicates_refused: int = Field(description="submitted again, and not counted again")


class LedgerPublic(_Answer):
    epochs: list[EpochPublic]


class PowerPublic(_Answer):
    """A machine's power supply, as far as it is known."""

    plugged: bool | None
    percent: float | None = Field(description="charge of the battery; null without a battery")


class WorkerPublic(_Answer):
    """A worker; for a worker that is offline, as last seen."""

    id: str
    online: bool
    name: str
    device: str = Field(description="device and model, such as `cuda:1 (NVIDIA H200)`, in words")
    queues: list[str]
    host: str
    pid: int | None
    memory_bytes: int = Field(description="of its computing device: the GPU's own with CUDA, else the machine's")
    max_memory_bytes: int | None = Field(description="memory limit for a job, set by the machine's owner")
    labels: dict[str, str] = Field(description="given by the machine's owner, for `requires` and `prefers` of jobs")
    recipes: list[str] = Field(description="digests of the recipes that its owner lets run; `*`: all signed ones")
    confinement: str | None = Field(
        description="by what it confines recipes, such as `bubblewrap`, or `none`; null: it runs no recipes"
    )
    packages: dict[str, str] = Field(
        description="recipes of packages installed there, by name, each with distribution and version"
    )
    versions: dict[str, Any]
    seat: str | None
    job_id: str | None = Field(description="the job that the worker serves now")
    job_share: float | None = Field(description="fraction of all samples counted in that job, 0 to 1")
    share: float = Field(description="fraction of all samples counted in the last hour, 0 to 1")
    samples_per_s: float
    bytes_up: int | None = Field(
        description="bytes that the machine has sent through gateways; null: it joined by none"
    )
    bytes_down: int | None = Field(description="bytes that it has received")
    refused: str | None = Field(
        description="why the worker gets no seats (a different version of ComputeShare), and what to do"
    )
    drained: bool = Field(description="the worker gets no seat until a user undrains it")
    leaving: bool = Field(description="a user removed the worker, and it has not ended yet")
    first_seen: Instant
    resting: str | None = Field(description="why the worker takes no seats now: a rule of the machine's owner")
    power: PowerPublic
    left_out: list[str] = Field(
        description="`Job ID: REASON` for each job that wants workers but cannot use this worker"
    )
    last_seen: Instant
    person: str | None = Field(description="whose the machine is; null: its invite named nobody")


class WorkerChange(BaseModel):
    """The fields of a worker that a user may change."""

    model_config = ConfigDict(extra="forbid", strict=True)

    person: Person | None = Field(
        description="whose the machine is, also in what it has computed so far; null: the control plane's owner, or of "
        "an invited machine nobody"
    )


class WorkerList(_Answer):
    items: list[WorkerPublic]


class JobWorkerPublic(_Answer):
    """A worker's contribution to a job."""

    id: str
    name: str
    device: str = Field(description="as in the list of workers")
    kinds: list[Kind] = Field(
        description="kind of machine, which decides the bits; several if it changed between two joins, newest last"
    )
    active: bool = Field(description="the worker takes part now")
    left_reason: str | None
    samples_per_s: float
    samples: int = Field(description="samples counted for this worker")
    share: float = Field(description="fraction of all counted samples, 0 to 1")
    accepted: int
    stale: int
    duplicate: int
    lease_lost: int
    fenced: int
    refused: int
    refused_reason: str | None
    strikes: int = Field(description="refused updates that count towards a ban")
    banned: str | None = Field(description="why the worker is banned from the job; a user can lift the ban")
    unfit: str | None = Field(
        description="why the worker's machine cannot take part: a failed self-test, as the worker reports it"
    )
    memory_bytes: int | None = Field(
        description="peak memory of its seat on the computing device; an estimate before its first work unit"
    )
    bytes_up: int
    bytes_down: int
    joined_at: Instant | None
    left_at: Instant | None
    last_seen: Instant


class ExchangePublic(_Answer):
    """How often a worker averaged its own weights with those of another."""

    worker: str
    peer: str = Field(description="whose weights it read")
    count: int
    distance: float | None = Field(
        description="how far they were apart the last time: root mean square of the difference of their weights"
    )


class StagesPublic(_Answer):
    """The stages that a worker holds, where a model is spread over workers."""

    worker: str
    chain: int = Field(
        description="0 and up; the workers of a chain hold all stages, and compute a micro-batch together"
    )
    first: int = Field(description="its first stage")
    stop: int = Field(description="the stage after its last")
    layers: list[str] = Field(description="of these stages")
    parameters: int
    busy: float | None = Field(
        description="share of the time of a micro-batch in which it computes; null: not known yet"
    )
    course: list[float] = Field(
        description="`busy` of its first stage over the job, oldest first; each value the mean of equally many "
        "micro-batches, whoever held the stage"
    )
    memory_bytes: int | None = Field(description="peak memory of its seat")
    mail_bytes: int | None = Field(description="activations and gradients that it sent for a micro-batch")


class JobWorkerList(_Answer):
    items: list[JobWorkerPublic]
    stages: list[StagesPublic] = Field([], description="who holds which stages, with strategy pipeline")
    bubble: float | None = Field(
        None, description="share of the time of a micro-batch in which a worker waits for others, mean over all"
    )
    exchanges: list[ExchangePublic] = Field([], description="who averaged with whom, with strategy gossip")


class _Contributed(_Answer):
    person: str | None = Field(description="whose; null: the machines' invites named nobody")
    samples: int = Field(description="samples counted")
    share: float = Field(description="fraction of the samples of all machines, 0 to 1")
    hours: float = Field(description="hours of taking part in jobs, summed over all workers")
    jobs: int
    last_seen: Instant


class Contribution(_Contributed):
    """A machine's contribution to all jobs that were not deleted."""

    name: str = Field(description="of the machine; its workers have new ids after each start")
    device: str = Field(description="the one that it last computed with")


class PersonContribution(_Contributed):
    """The contribution of all of a person's machines to all jobs that were not deleted."""

    machines: int


class ContributionList(_Answer):
    items: list[Contribution]
    people: list[PersonContribution] = Field(description="the same, summed by person")


class QueuedJobPublic(_Answer):
    """A job that wants workers of a queue."""

    id: str
    title: str
    status: JobStatus
    priority: int
    wanted: int = Field(description="workers that the job can use at once")
    held: int = Field(description="workers that the job has")


class QueuePublic(_Answer):
    """A queue that has workers or unfinished jobs."""

    name: str
    workers: int = Field(description="workers online that serve the queue")
    queued: int
    running: int
    jobs: list[QueuedJobPublic] = Field(description="queued and running jobs, in the order in which they get workers")


class QueueList(_Answer):
    items: list[QueuePublic]


class InviteRequest(BaseModel):
    """The queue that the invited worker is to serve, the invite's lifetime, and that of its machine's access."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queue: str = Field("default", pattern=QUEUE_PATTERN)
    minutes: int = Field(15, ge=1, le=1440)
    days: int | None = Field(
        None, ge=1, le=3650, description="days until the gateway refuses the machine; null: only once it is withdrawn"
    )
    person: Person | None = Field(None, description="for whom it is: the machine's contributions count as theirs")


class InvitePublic(_Answer):
    """An invite: a link that admits one worker, once."""

    id: str
    queue: str
    status: Literal["pending", "taken", "joined", "ended", "expired"] = Field(
        description="taken: a machine has used the invite; joined: it has since appeared on the queue; ended: its "
        "access to the gateway is over; expired: no machine has used it in time"
    )
    worker: str | None = Field(description="the name that the invited machine gave")
    gateway: bool = Field(False, description="whether a machine joined through the gateway: withdrawing cuts it off")
    bytes_up: int = Field(0, description="bytes that the machine sent through gateways; in lists only")
    bytes_down: int = Field(0, description="bytes that the machine received through gateways; in lists only")
    created_at: Instant
    expires_at: Instant
    access_ends_at: Instant | None = Field(None, description="when the gateway begins to refuse the machine")
    person: str | None = Field(None, description="for whom it was made")


class InviteCreated(InvitePublic):
    """A new invite with its link; later answers do not contain the link."""

    url: str
    command: str = Field(description="the command to run on the invited machine, where ComputeShare is installed")
    new_machine: list[str] = Field(
        description="commands for a machine where it is not: the first for those that have uv, the second for pipx"
    )
    qr: str = Field(description="the link as a QR code: an SVG image in a data URI")
    note: str | None = Field(
        description="why no other machine can join, else a warning about those that join; null if there is no problem"
    )
    blocked: bool = Field(description="whether no other machine can join yet, for the reason in `note`")
    remedy: str | None = Field(description="a command that starts the control plane so that they can")


class WorkerRelease(_Answer):
    """The worker that fits this control plane: a wheel at `/v1/worker/FILE`."""

    version: str
    protocol: int
    file: str = Field(description="name of the wheel")
    sha256: str = Field(description="SHA-256 of the wheel, in hex")
    size: int = Field(description="bytes of the wheel")


class InviteList(_Answer):
    items: list[InvitePublic]


class JoinRequest(BaseModel):
    """A worker's name and public key, sent to take up an invite."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
    public_key: str = Field(
        "", max_length=64, description="the machine's Ed25519 key, in hex; repeating it repeats the answer"
    )
    signature: str = Field("", max_length=128, description="by that key, over the invite's code and the key, in hex")


class KeyRequest(BaseModel):
    """A machine's new public key, signed by its present one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    public_key: str = Field(pattern=rf"^{PUBLIC_KEY}$", description="the new Ed25519 key, in hex")
    signature: str = Field(pattern=rf"^{SIGNATURE}$", description="by the present key, over the new one, in hex")


class Admission(_Answer):
    """How an invited worker reaches the broker, and the queue that it is to serve."""

    queue: str
    redis_url: str | None = Field(None, description="the broker's address; null: use the gateway")
    gateway: str | None = Field(None, description="path of the gateway's WebSocket, below the control plane's address")
    machine: str | None = Field(None, description="the machine's id at the gateway")
    control_key: str | None = Field(None, description="the Ed25519 key by which the control plane signs, in hex")


class VersionPublic(_Answer):
    """A version that stands, and the updates it was made of."""

    version: int
    token: str | None = Field(description="null if the version's record was lost")
    sha256: str | None = Field(description="SHA-256 of the weights; null if the version's record was lost")
    loss: float | None
    counted: list[tuple[int, str, int]] = Field(
        description="number, worker and samples of each work unit (micro-batch; strategy local: replica), in order"
    )
    staleness: list[int] = Field(
        description="for each work unit, how many versions late its update was; empty if none was late"
    )


class VersionPage(_Answer):
    """Versions, ascending."""

    items: list[VersionPublic]
    next_since: int | None = Field(description="`since` of the next page; null on the last page")


class SamplePublic(_Answer):
    """A short text by a version of a language model: what follows a line break, with the same draws for all."""

    version: int
    at: Instant
    loss: float | None
    text: str


class SamplePage(_Answer):
    """Samples, newest version first."""

    items: list[SamplePublic]
    next_cursor: str | None


class GenerateRequest(BaseModel):
    """A prompt for a job's language model."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field("\n", max_length=LONGEST_PROMPT)
    characters: int = Field(
        200, ge=1, le=MOST_CHARACTERS, description="of the continuation; a slow model ends it earlier"
    )
    temperature: float = Field(
        0.8, ge=0, le=HOTTEST, description="0: always the likeliest character; 1: as the model says"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="the same seed gives the same text")
    version: Annotated[int, Field(ge=0, lt=2**53)] | Literal["latest", "best"] = "latest"


class TextPublic(_Answer):
    """The text with which a version continues the prompt."""

    version: int
    prompt: str
    text: str


class CheckpointPublic(_Answer):
    """A version whose weights can be downloaded; `sha256` is that of the moving average, if the job keeps one."""

    version: int
    token: str
    sha256: str
    bytes: int
    at: Instant
    accuracy: float | None
    loss: float | None
    own_metrics: OwnMetrics | None = Field(description="a recipe's own metrics, by name")
    tested: OnTestSet | None = Field(description="score on the test set, if the others are on a validation split")
    best: bool
    copied: bool = Field(description="whether it has been copied to the address of COMPUTESHARE_COPY_TO")
    url: str


class ClassPublic(_Answer):
    """A class of a classifier, with fractions of samples."""

    number: int
    name: str | None
    precision: float | None = Field(description="of the samples that were given this class, those of it; null if none")
    recall: float | None = Field(description="of the samples of this class, those that were given it; null if none")
    f1: float | None = Field(description="harmonic mean of precision and recall; null if no sample is of this class")
    support: int = Field(description="samples of this class")


class ConfusedPublic(_Answer):
    """Two classes that a classifier confuses, by number: `samples` of class `actual` were given class `predicted`."""

    actual: int
    predicted: int
    samples: int


class ClassScoresPublic(_Answer):
    """A version's scores by class on a part of the data."""

    part: ScoredPart
    samples: int
    classes: list[ClassPublic]
    confusion: list[list[int]] | None = Field(
        description="row i, column j: samples of class i that were given class j; null with more than "
        f"{MOST_IN_MATRIX} classes"
    )
    confused: list[ConfusedPublic] = Field(description="the most frequent mistakes, the most frequent first")


class ClassesPublic(_Answer):
    """A version's scores by class: on the part of the data that versions are compared by and, for the last version of a
    job with a validation split, on the test set too.
    """

    version: int
    parts: list[ClassScoresPublic]


class CheckpointList(_Answer):
    items: list[CheckpointPublic]
    copy_error: str | None = Field(description="why the newest attempt to copy checkpoints failed; null: it did not")


class Point(_Answer):
    """A value of a series."""

    version: int
    value: float
    at: Instant


class Metrics(_Answer):
    """Series by version, ascending."""

    train_loss: list[Point]
    test_loss: list[Point]
    test_accuracy: list[Point] = Field(description="empty for a language model")
    validation_loss: list[Point] = Field(
        description="for a job with a validation split; the test set's series then hold its best and its last version"
    )
    validation_accuracy: list[Point]
    perplexity: list[Point] = Field(description="of the same split; empty unless the job trains a language model")
    own_metrics: dict[str, list[Point]] = Field({}, description="a recipe's own metrics, by name, of the same split")
    samples_per_s: list[Point]
    bytes_up: list[Point] = Field(description="bytes per version, of all workers")
    bytes_down: list[Point] = Field(description="bytes per version, of all workers")
    staleness: list[Point] = Field(
        description="mean lateness of a version's updates, in versions; empty unless the strategy accepts late updates"
    )
    consensus: list[Point] = Field(
        [],
        description="how far workers' own weights are from their mean, which is the version: root mean square over "
        "workers and parameters; with strategy gossip",
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
    at: Instant = Field(description="by the clock of the machine that wrote the line")
    worker: str = Field(description="the worker's id, `reducer` or `evaluator`; as the sender claims")
    name: str = Field(description="the worker's name; the host of a reducer or evaluator")
    level: Level
    text: str
    data: dict[str, Any] = Field(description="further fields of the line, by name; `exception` is a traceback")


class LogPage(_Answer):
    """Lines of a job's log, ascending."""

    items: list[LogLinePublic]
    previous: int | None = Field(
        description="`before` of the page with the lines before these; null if there are none, or with `after`"
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
        400: "the Host header names another server, or the body is unreadable",
        401: "the token is missing or wrong",
        403: "the request comes from another site's page",
        404: "what the request names does not exist",
        409: "the present state forbids it, such as pausing a job that has ended",
        413: "the body is too large",
        422: "the request is not valid",
        429: "this address sent too many wrong keys or codes: try again after Retry-After seconds",
        431: "too many headers, or too large ones",
        503: "the broker or the database is not available: try again after Retry-After seconds",
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
    """The package's version, and the version of its protocol with workers."""

    version: str
    protocol: int
