"""The answers of the REST API as clients see them: jobs, checkpoints, events, problems."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import httpx2

from computeshare.errors import ApiError
from computeshare.jobspec.tasks.facts import Metric
from computeshare.runtime.log_lines import Level
from computeshare.types import JobStatus, Kind, Outcome

ICONS: dict[str, str] = {
    "queued": "○",
    "running": "▶",
    "paused": "‖",
    "completed": "✓",
    "failed": "✗",
    "cancelled": "■",
}
"""A job's status as one character."""


class Problem(ApiError):
    """The control plane refused the request; `errors` holds a field and a message for each error."""

    def __init__(self, detail: str, status: int, errors: Sequence[tuple[str, str]] = ()) -> None:
        named = [f"{field}: {message}" if field else message for field, message in errors]
        super().__init__("\n".join(named) or detail, status)
        self.detail = detail
        self.errors = tuple(errors)


class Reducer(TypedDict):
    """The process that computes a job's versions; `kind` describes its machine, if recorded."""

    host: str
    pid: int
    kind: NotRequired[Kind | None]


class ForkedFrom(TypedDict):
    """The version of another job from which a job started."""

    job_id: str
    version: int
    sha256: str
    optimizer: str


class OnTestSet(TypedDict):
    """A version's score on the test set, where versions are compared on a validation split."""

    version: int
    loss: float | None
    accuracy: float | None
    samples: int
    own_metrics: NotRequired[dict[str, float | None] | None]


class Job(TypedDict):
    """A job; times are ISO 8601, sizes bytes, `accuracy` a fraction, losses of language models nats."""

    id: str
    name: str
    title: NotRequired[str]
    queue: str
    priority: NotRequired[int]
    spec: dict[str, Any]
    status: JobStatus
    reason: str | None
    reason_code: NotRequired[str | None]
    missing_workers: NotRequired[int]
    error: str | None
    version: int
    rounds_total: int
    epoch: int
    epochs_total: NotRequired[int]
    loss: float | None
    metric: NotRequired[Metric]
    accuracy: float | None
    test_loss: NotRequired[float | None]
    perplexity: NotRequired[float | None]
    own_metrics: NotRequired[dict[str, float | None] | None]
    tested: NotRequired[OnTestSet | None]
    tested_last: NotRequired[OnTestSet | None]
    best_version: int | None
    best_accuracy: NotRequired[float | None]
    best_loss: NotRequired[float | None]
    durable_version: int
    weights_sha256: str | None
    epsilon: NotRequired[float | None]
    epsilon_total: NotRequired[float | None]
    samples_per_s: float
    reducer: NotRequired[Reducer | None]
    forked_from: NotRequired[ForkedFrom | None]
    warnings: NotRequired[list[str]]
    workers: int
    accepted: int
    stale: int
    duplicate: int
    lease_lost: NotRequired[int]
    fenced: NotRequired[int]
    refused: NotRequired[int]
    audited: NotRequired[int]
    confirmed: NotRequired[int]
    bytes_up: int
    bytes_down: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    paused_at: NotRequired[str | None]
    stopped_s: NotRequired[float]
    left_s: NotRequired[float | None]
    last_event_id: NotRequired[int]


def quality(job: "Job | ComparedJob") -> str | None:
    """The score of the version scored last: `accuracy 97.31 %`, or `test loss 1.4697 nats, perplexity 4.35`; None
    before there is one.
    """
    if (accuracy := job["accuracy"]) is not None:
        return f"accuracy {100 * accuracy:.2f} %"
    if (loss := job.get("test_loss")) is None or job.get("metric") != "loss":
        return None
    spec: Any = job.get("spec") or {}
    perplexity = job.get("perplexity")
    told = f"{'validation' if spec.get('validation') else 'test'} loss {loss:.4f}"
    return told + (f" nats, perplexity {perplexity:.2f}" if perplexity is not None else "")


def tested(job: Job) -> str | None:
    """The score on the test set of a job with a validation split, of the best version and, where it is another, of the
    last: `test accuracy 97.10 % at version 300, 96.81 % at version 400`; None before there is one.
    """
    told = [f"{_score(one)} at version {one['version']}" for one in (job.get("tested"), job.get("tested_last")) if one]
    if not told:
        return None
    return f"test {'loss' if job.get('metric') == 'loss' else 'accuracy'} {', '.join(told)}"


def _score(one: OnTestSet) -> str:
    if (accuracy := one["accuracy"]) is not None:
        return f"{100 * accuracy:.2f} %"
    return "–" if one["loss"] is None else f"{one['loss']:.4f}"


def trouble(job: Job) -> str | None:
    """A job's error, without the traceback that may follow an empty line, else the reason why it is not running."""
    return job["error"].partition("\n\n")[0] if job["error"] else job["reason"]


class Checkpoint(TypedDict):
    """A version whose weights can be downloaded."""

    version: int
    sha256: str
    bytes: int
    accuracy: float | None
    loss: NotRequired[float | None]
    own_metrics: NotRequired[dict[str, float | None] | None]
    tested: NotRequired[OnTestSet | None]
    best: bool
    copied: NotRequired[bool]


class ClassScore(TypedDict):
    """A class of a classifier: fractions, None where there is nothing to divide by, and its number of samples."""

    number: int
    name: str | None
    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class Confused(TypedDict):
    """So many samples of one class, by number, that were given another."""

    actual: int
    predicted: int
    samples: int


class ClassScores(TypedDict):
    """A version's scores by class on a part of the data; `confusion` is None with more than 100 classes."""

    part: str
    samples: int
    classes: list[ClassScore]
    confusion: list[list[int]] | None
    confused: list[Confused]


class Sample(TypedDict):
    """A short text by a version of a language model."""

    version: int
    at: str
    loss: float | None
    text: str


class JobWorker(TypedDict):
    """A worker's part in a job; `share` is a fraction of all counted samples, `banned` the reason for a ban."""

    id: str
    name: str
    device: str
    kinds: NotRequired[list[Kind]]
    active: bool
    left_reason: str | None
    samples_per_s: float
    samples: int
    share: float
    accepted: int
    stale: int
    refused: int
    refused_reason: str | None
    banned: str | None
    unfit: NotRequired[str | None]
    memory_bytes: NotRequired[int | None]
    bytes_up: int
    bytes_down: int
    joined_at: str | None
    left_at: str | None
    last_seen: str


class Seconds(TypedDict):
    """The seconds that a worker spent on one submission, by activity."""

    waiting: float
    computing: float
    encoding: float
    uploading: float


class Submission(TypedDict):
    """One worker's message, and its outcome."""

    id: int
    at: str
    worker: str
    nonce: str
    outcome: Outcome
    reason: str | None
    base_version: int | None
    current_version: int | None
    micro_batches: list[int]
    samples: int
    bytes_up: int
    bytes_down: int
    seconds: Seconds
    voided: bool


class Estimate(TypedDict):
    """The factor by which one more worker would speed a job up: likely value and range, or the `reason` for None."""

    low: float | None
    likely: float | None
    high: float | None
    reason: str | None


class ComparedJob(TypedDict):
    """The results of one of several compared jobs."""

    id: str
    title: str
    status: JobStatus
    version: int
    rounds_total: int
    metric: NotRequired[Metric]
    best_accuracy: float | None
    best_loss: NotRequired[float | None]
    best_version: int | None
    accuracy: float | None
    test_loss: NotRequired[float | None]
    perplexity: NotRequired[float | None]
    tested: NotRequired[OnTestSet | None]
    lowest_test_loss: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    accepted: int
    dropped: int
    seconds: float | None


class Comparison(TypedDict):
    """Compared jobs; `differences` maps each differing field of their specifications (dotted) to every job's value."""

    items: list[ComparedJob]
    differences: dict[str, list[Any]]


class EpochLedger(TypedDict):
    """How many of an epoch's samples were counted, missing, reassigned or refused as duplicates."""

    epoch: int
    samples: int
    counted: int
    missing: int
    reassigned: int
    duplicates_refused: int


class Version(TypedDict):
    """A version that no restore has undone.

    `counted` holds unit, worker and samples of each update in it; `staleness`, in the same order, how many versions
    before its base each update was computed (empty: all on its base).
    """

    version: int
    sha256: str | None
    counted: list[tuple[int, str, int]]
    staleness: NotRequired[list[int]]


class LogLine(TypedDict):
    """A line of a job's log; `data` holds its structured fields, with a traceback under `exception`."""

    id: int
    at: str
    worker: str
    name: str
    level: Level
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a job's event stream. Type `job` carries the whole job; `lost` reports a broken connection."""

    id: int
    type: str
    data: dict[str, Any]


def event(message: httpx2.ServerSentEvent) -> Event:
    """Read a server-sent event. Without a numeric id its id is 0."""
    try:
        data = message.json()
    except ValueError:
        data = message.data
    number = int(message.id) if message.id.isascii() and message.id.isdecimal() else 0
    return Event(number, message.event, data if isinstance(data, dict) else {"value": data})


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """The JSON object in a response. Raises Problem: there is none."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Problem(f"{response.url} does not answer like a control plane: check COMPUTESHARE_URL", 502)
    return found


def items(response: httpx2.Response) -> tuple[list[Any], str | None]:
    """The items of a list's page, and the cursor of the next page. Raises Problem: the response is no such page."""
    page = json_object(response)
    if not isinstance(page.get("items"), list):
        raise Problem(f"{response.url} does not answer like a control plane: check COMPUTESHARE_URL", 502)
    return page["items"], page.get("next_cursor")


def raise_for_problem(response: httpx2.Response) -> None:
    """Raise Problem unless the response reports success."""
    if response.is_success:
        return
    if response.is_redirect:
        where = response.headers.get("Location", "elsewhere")
        raise Problem(f"{response.url} redirects to {where}: check COMPUTESHARE_URL", response.status_code)
    try:
        body = response.json()
    except ValueError:
        body = None
    body = body if isinstance(body, dict) else {}
    detail = str(body.get("detail") or body.get("title") or f"{response.status_code} {response.reason_phrase}")
    if response.status_code == 401:
        detail = (
            "the control plane got no token that it knows: set COMPUTESHARE_TOKEN to what `computeshare token` prints "
            "on the control plane's machine, or ask its owner for a token of your own"
        )
    raise Problem(detail, response.status_code, list(_field_errors(body.get("errors"))))


def _field_errors(errors: object) -> Iterator[tuple[str, str]]:
    """Yield field and message of each of a problem's `errors`; a field's JSON pointer is turned into dotted form."""
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, dict):
            field = str(error.get("field") or error.get("pointer") or "").lstrip("#/").replace("/", ".")
            yield field.removeprefix("body."), str(error.get("message") or error.get("detail") or "is wrong")
