"""One job: what was last told of it, and all that can be done with it."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from computeshare.client import weights
from computeshare.client.api.calls import Client
from computeshare.client.api.models import (
    Checkpoint,
    EpochLedger,
    Estimate,
    Event,
    JobWorker,
    LogLine,
    Submission,
    trouble,
)
from computeshare.client.api.models import Job as Document
from computeshare.client.async_events import stream
from computeshare.client.card import card
from computeshare.client.event_thread import Follower
from computeshare.client.metrics import Metrics
from computeshare.errors import JobFailed
from computeshare.types import ENDED, JobStatus

if TYPE_CHECKING:
    from torch import Tensor

_LOOK_S = 60.0
Told = TypeVar("Told")


class Field(Generic[Told]):
    """A field of the job's document, as it was told last; None where the control plane does not tell it."""

    def __init__(self, read: Callable[[Any], Any] = lambda value: value) -> None:
        self._read = read

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, job: "Job", _: type | None = None) -> Told:
        return cast(Told, self._read(cast(dict[str, Any], job.document).get(self._name)))


def _instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


class Job:
    """A job. Its fields are a snapshot: `refresh`, `wait` and the events bring it up to date.

    `accuracy` is a fraction of the test set, of the version scored last; `loss` that of the newest version's round;
    sizes are bytes; `rounds_total` is the version that the job ends with. Methods raise NoServer and Problem.
    """

    id = Field[str]()
    name = Field[str]()
    title = Field[str]()
    queue = Field[str]()
    priority = Field[int]()
    spec = Field[dict[str, Any]]()
    status = Field[JobStatus]()
    reason = Field[str | None]()
    error = Field[str | None]()
    version = Field[int]()
    rounds_total = Field[int]()
    epoch = Field[int]()
    loss = Field[float | None]()
    accuracy = Field[float | None]()
    best_version = Field[int | None]()
    best_accuracy = Field[float | None]()
    durable_version = Field[int]()
    weights_sha256 = Field[str | None]()
    samples_per_s = Field[float]()
    bytes_up = Field[int]()
    bytes_down = Field[int]()
    created_at = Field[datetime](_instant)
    started_at = Field[datetime | None](_instant)
    finished_at = Field[datetime | None](_instant)

    def __init__(self, document: Document, client: Client, cache: weights.WeightsCache) -> None:
        self.document, self._client, self._cache = document, client, cache

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.status} {self.version}/{self.rounds_total}>"

    def _repr_html_(self) -> str:
        return card(self.document, self.url)

    @property
    def url(self) -> str:
        """The job's page."""
        return f"{self._client.url}/jobs/{self.id}"

    @property
    def ended(self) -> bool:
        """Whether it has completed, failed or been cancelled."""
        return self.status in ENDED

    def refresh(self) -> "Job":
        """Ask how the job is now."""
        return self._told(self._client.show(self.id))

    def wait(self, timeout_s: float | None = None) -> "Job":
        """Wait until the job has ended, through outages of a control plane that answers now.

        Args:
            timeout_s: seconds to wait at most; None: as long as it takes.
        Raises: JobFailed: it failed or was cancelled. TimeoutError: it goes on after that time; so may you.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self.refresh().ended:
            self._follow_to_end(deadline)
        if self.status != "completed":
            raise JobFailed(self.id, self.status, trouble(self.document) or "")
        return self

    def events(self, after: int | None = None) -> Iterator[Event]:
        """What happens until the job has ended; lost connections are taken up where they broke off.

        Events of type `job` bring the snapshot up to date; `lost` tells of an outage; the others are the timeline.
        Args:
            after: id of the event to go on from, 0 for the whole timeline; default from the snapshot on.
        """
        for event in self._client.follow(self.document, after=after):
            self._saw(event)
            yield event

    async def stream(self, after: int | None = None) -> AsyncGenerator[Event]:
        """As `events`, with `async for`: cancelling its task closes the connection, and so does `aclosing`."""
        async with aclosing(stream(self._client, self.document, after)) as events:
            async for event in events:
                self._saw(event)
                yield event

    def metrics(self, since: int = 0, points: int = 1000) -> Metrics:
        """Series by version.

        Args:
            since: only versions above this one.
            points: about so many a series, 10,000 at most; of more versions, some are left out evenly.
        """
        return Metrics.of(self._client.metrics(self.id, since, points=points))

    def logs(
        self, limit: int | None = 100, worker: str | None = None, level: str | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """What workers, reducer and evaluator logged, ascending, those that have left too.

        Args:
            limit: how many of the newest lines; None: all.
            worker: only those of this one: its id or its name.
            level: only those of at least this level: `debug`, `info`, `warning` or `error`.
            follow: go on with those that come, until the job has ended; lost connections are taken up again.
        """
        last = 0
        for line in self._client.logs(self.id, worker, level, limit):
            last = line["id"]
            yield line
        if follow:
            yield from self._client.follow_logs(self.id, worker, level, last)

    def load(self, version: int | str = "latest") -> "dict[str, Tensor]":
        """The weights of a version as a state dict on the CPU, checked by their sha256 and kept for the next time.

        Args:
            version: its number, `latest` or `best`; see `checkpoints` for those there are.
        Raises: ArtifactError: they are not what the control plane announced, or cannot be written here.
        """
        chosen = weights.pick(self.checkpoints(), str(version), self.id)
        return weights.read(self._cache.fetch(self._client, self.id, chosen))

    def pause(self, after_round: bool = False, hours: float | None = None) -> "Job":
        """Let a queued or running job rest, at once or once its round is done; for so many hours, or until resumed."""
        return self._told(self._client.pause(self.id, after_round, hours))

    def resume(self) -> "Job":
        """Let a paused job go on where it was."""
        return self._told(self._client.resume(self.id))

    def cancel(self) -> "Job":
        """Stop the job for good."""
        return self._told(self._client.cancel(self.id))

    def retry(self) -> "Job":
        """Let a failed job go on from its last checkpoint."""
        return self._told(self._client.retry(self.id))

    def prioritise(self, priority: int) -> "Job":
        """Give a job that has not ended another priority, -100 to 100: those with more get workers first."""
        return self._told(self._client.prioritise(self.id, priority))

    def rename(self, name: str) -> "Job":
        """Give the job another name; an empty one: what it trains names it."""
        return self._told(self._client.rename(self.id, name))

    def edit(self, **changes: Any) -> "Job":
        """Change fields of the JobSpec: any time what only describes the job, its priority while it has not ended."""
        return self._told(self._client.edit(self.id, changes))

    def fork(self, version: int | str = "latest", *, optimizer: str | None = None, **changes: Any) -> "Job":
        """Create a job that starts from a version of this one.

        Args:
            version: its number, `latest` or `best`.
            optimizer: `kept` or `fresh`; by default its state is kept where its settings stay the same.
            changes: fields of the JobSpec that are different.
        """
        made = self._client.fork(self.id, version, {**changes}, optimizer)
        return Job(made, self._client, self._cache)

    def delete(self) -> None:
        """Forget the job, which has to have ended, and its checkpoints."""
        self._client.delete(self.id)

    def workers(self) -> list[JobWorker]:
        """Who takes or took part, the active ones first."""
        return self._client.workers(self.id)

    def submissions(
        self, limit: int | None = 100, outcome: str | None = None, worker: str | None = None
    ) -> Iterator[Submission]:
        """What workers sent, newest first, and what became of it.

        Args:
            limit: how many at most; None: all.
            outcome: only `accepted`, `stale`, `duplicate`, `lease_lost`, `fenced` or `refused` ones.
            worker: only those of the worker with this id.
        """
        return self._client.submissions(self.id, limit, outcome, worker)

    def checkpoints(self) -> list[Checkpoint]:
        """The versions whose weights can be loaded, newest first."""
        return self._client.checkpoints(self.id)

    def ledger(self) -> list[EpochLedger]:
        """How often each sample of each epoch counted."""
        return self._client.ledger(self.id)

    def estimate(self) -> Estimate:
        """How many times as fast the job would be with one more worker, or in `reason` why nothing is said."""
        return self._client.estimate(self.id)

    def _follow_to_end(self, deadline: float | None) -> None:
        with Follower(self._client, self.document) as follower:
            while (left := _LOOK_S if deadline is None else deadline - time.monotonic()) > 0:
                event = follower.next(min(left, _LOOK_S))
                if event == "end":
                    return
                if event is not None:
                    self._saw(event)
        raise TimeoutError(f"job {self.id} is still {self.status}: {self.reason or 'it goes on; wait again'}")

    def _saw(self, event: Event) -> None:
        if event.type == "job":
            self._told(cast(Document, {**self.document, **event.data}))

    def _told(self, document: Document) -> "Job":
        self.document = document
        return self
