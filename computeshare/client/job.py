"""One job: its fields as last received from the control plane, and its operations."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from computeshare.bundles.manifest import DIGEST
from computeshare.client import exports, recipes, weights
from computeshare.client.api.calls import Client
from computeshare.client.api.models import (
    Checkpoint,
    ClassScores,
    EpochLedger,
    Estimate,
    Event,
    JobWorker,
    LogLine,
    OnTestSet,
    Sample,
    Submission,
    trouble,
)
from computeshare.client.api.models import Job as Document
from computeshare.client.async_events import stream
from computeshare.client.bundles.downloads import download
from computeshare.client.card import card
from computeshare.client.event_thread import Follower
from computeshare.client.exports import Format
from computeshare.client.metrics import Metrics
from computeshare.client.model_card import Facts, model_card
from computeshare.client.recipes import Chosen
from computeshare.errors import JobFailed
from computeshare.jobspec.tasks.facts import Metric
from computeshare.jobspec.tasks.recipe_facts import FROZEN
from computeshare.tasks.own.files import TOKENIZER
from computeshare.types import ENDED, JobStatus

if TYPE_CHECKING:
    from torch import Tensor, nn

    from computeshare.tasks.base import Task
    from computeshare.tasks.trained import TrainedModel
    from computeshare.tasks.usage import Guess

_LOOK_S = 60.0
Told = TypeVar("Told")


class Field(Generic[Told]):
    """A field of the job's document, as last received; None if the control plane did not send it."""

    def __init__(self, read: Callable[[Any], Any] = lambda value: value) -> None:
        self._read = read

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, job: "Job", _: type | None = None) -> Told:
        return cast(Told, self._read(cast(dict[str, Any], job.document).get(self._name)))


def _instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


class Job:
    """A job. Its fields are a snapshot, updated by `refresh`, `wait`, `events` and `stream`.

    `accuracy` is a fraction of the test set, for the version scored last, `test_loss` its loss there (a language model
    has no accuracy, but a `perplexity`; a recipe may have `own_metrics`); with a validation split they are of that, and
    at the end `tested` is the best version's score on the test set; `loss` is that of the newest version's round; sizes
    are in bytes; `rounds_total` is the number of the job's last version. Methods raise NoServer and Problem.
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
    epochs_total = Field[int]()
    loss = Field[float | None]()
    metric = Field[Metric]()
    accuracy = Field[float | None]()
    test_loss = Field[float | None]()
    perplexity = Field[float | None]()
    own_metrics = Field[dict[str, float | None] | None]()
    tested = Field[OnTestSet | None]()
    tested_last = Field[OnTestSet | None]()
    best_version = Field[int | None]()
    best_accuracy = Field[float | None]()
    best_loss = Field[float | None]()
    durable_version = Field[int]()
    weights_sha256 = Field[str | None]()
    epsilon = Field[float | None]()
    epsilon_total = Field[float | None]()
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
        """Address of the job's page."""
        return f"{self._client.url}/jobs/{self.id}"

    @property
    def ended(self) -> bool:
        """Whether the job has completed, failed or been cancelled."""
        return self.status in ENDED

    def refresh(self) -> "Job":
        """Fetch the job's current state."""
        return self._told(self._client.show(self.id))

    def wait(self, timeout_s: float | None = None) -> "Job":
        """Wait until the job has ended.

        The control plane must answer the first request; later outages are waited out.
        Args:
            timeout_s: most seconds to wait; None: no limit.
        Raises: JobFailed: the job failed or was cancelled. TimeoutError: the job goes on after that time; wait again.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self.refresh().ended:
            self._follow_to_end(deadline)
        if self.status != "completed":
            raise JobFailed(self.id, self.status, trouble(self.document) or "")
        return self

    def events(self, after: int | None = None) -> Iterator[Event]:
        """Yield the job's events until it has ended; a lost connection is reopened where it broke off.

        Events of type `job` update this snapshot; `lost` reports an outage; the other types are the job's timeline.
        Args:
            after: id of the event to continue after, 0 for the whole timeline; default: the snapshot's last event.
        """
        for event in self._client.follow(self.document, after=after):
            self._saw(event)
            yield event

    async def stream(self, after: int | None = None) -> AsyncGenerator[Event]:
        """As `events`, for `async for`: cancelling its task closes the connection, and so does `aclosing`."""
        async with aclosing(stream(self._client, self.document, after)) as events:
            async for event in events:
                self._saw(event)
                yield event

    def metrics(self, since: int = 0, points: int = 1000) -> Metrics:
        """Metrics by version.

        Args:
            since: only versions above this one.
            points: about this many points per series, 10,000 at most; of more versions, some are left out evenly.
        """
        return Metrics.of(self._client.metrics(self.id, since, points=points))

    def logs(
        self, limit: int | None = 100, worker: str | None = None, level: str | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """Yield log lines of the job's workers (also those that have left), reducer and evaluator, ascending.

        Args:
            limit: number of newest lines; None: all.
            worker: only lines of this worker: its id or its name.
            level: only lines of at least this level: `debug`, `info`, `warning` or `error`.
            follow: then yield new lines until the job has ended, reconnecting after outages.
        """
        last = 0
        for line in self._client.logs(self.id, worker, level, limit):
            last = line["id"]
            yield line
        if follow:
            yield from self._client.follow_logs(self.id, worker, level, last)

    def load(self, version: int | str = "latest") -> "dict[str, Tensor]":
        """A version's weights as a state dict on the CPU, downloaded unless cached, and checked by sha256.

        Args:
            version: a number, `latest` or `best`; `checkpoints` lists the available versions.
        Raises: ArtifactError: the weights are not those that the control plane announced, or cannot be stored.
        """
        return weights.read(self._fetch(self.checkpoint(version)))

    def module(self, version: int | str = "latest", recipe: Chosen = None) -> "nn.Module":
        """A version's model, ready to use: on the CPU, in eval mode, with the weights that `load` returns.

        Args:
            version: as for `load`.
            recipe: for a job that trains a recipe, whose code then runs in this process: your own file or folder of it,
                or `stored` for the copy that the control plane has.
        Raises: ArtifactError: as `load`. SpecError, ShapeError: this release cannot build the job's model, or `recipe`
            is needed. RecipeError: it is another recipe, or fails. BundleError: its frozen weights cannot be loaded.
        """
        return self.trained(version, recipe).module

    def trained(self, version: int | str = "latest", recipe: Chosen = None) -> "TrainedModel":
        """A version's model with what the job knows of its use: `guess` for image files, `generate` for texts.

        Args, Raises: as `module`.
        """
        from computeshare.tasks import trained

        checkpoint = self.checkpoint(version)
        task = self._task(recipe)
        module = trained.module_of(task, weights.read(self._fetch(checkpoint)), self.spec["seed"])
        return trained.TrainedModel(checkpoint["version"], task, module)

    def predict(
        self, *files: str | Path, top: int = 3, version: int | str = "latest", recipe: Chosen = None
    ) -> "list[list[Guess]]":
        """Classify files: for each file its likeliest classes, the likeliest first.

        Args:
            files: images, of any size and mode; for a recipe, what its `predict` reads.
            top: most classes for each file.
            version: as for `load`.
            recipe: as for `module`.
        Raises: InputError: a file cannot be read as an image. SpecError: the job trains no classifier of images, or a
            recipe without `predict`; and as `module`.
        """
        model = self.trained(version, recipe)
        return [model.guess(Path(file), top) for file in files]

    def export(
        self,
        path: str | Path,
        format: Format = "safetensors",
        version: int | str = "latest",
        recipe: Chosen = None,
    ) -> None:
        """Write a version's model to a file, complete or not at all.

        Args:
            path: the file; its folder must exist.
            format: `safetensors`, the weights as they are stored; `state_dict`, a file for `torch.load` with
                `weights_only=True`; or `onnx`, from `input` to `output`, for batches of any size.
            version: as for `load`.
            recipe: as for `module`; `safetensors` does not need it, and holds what is trained alone.
        Raises: ArtifactError: as `load`, or the file cannot be written. PackageMissing: ONNX needs packages that are
            not installed. SpecError, ShapeError: this release cannot build the job's model, or torch cannot export it.
            RecipeError, BundleError: as `module`.
        """
        task = None if format == "safetensors" else self._task(recipe)
        exports.export(task, self.spec["seed"], self._fetch(self.checkpoint(version)), Path(path), format)

    def model_card(self, file: str, version: int | str = "latest") -> str:
        """A model card in Markdown for a version in a file of this name, as `export` writes it.

        Raises: SpecError: this release cannot build the job's model.
        """
        from computeshare.tasks import trained

        facts = Facts(self.refresh().document, self.checkpoint(version), self.ledger(), self.workers())
        spec = trained.spec_of_job(self.spec)
        if spec.recipe:
            return model_card(facts, recipes.usage_of(spec), spec.parameters, file)
        task = trained.task_of_job(self.spec)
        return model_card(facts, task.usage, task.layout().parameters, file)

    def pause(self, after_round: bool = False, hours: float | None = None) -> "Job":
        """Pause a queued or running job, at once or at the end of its round, for `hours` or until `resume`."""
        return self._told(self._client.pause(self.id, after_round, hours))

    def resume(self) -> "Job":
        """Continue a paused job where it stopped."""
        return self._told(self._client.resume(self.id))

    def cancel(self) -> "Job":
        """Stop the job for good."""
        return self._told(self._client.cancel(self.id))

    def retry(self) -> "Job":
        """Continue a failed job from its last checkpoint."""
        return self._told(self._client.retry(self.id))

    def prioritise(self, priority: int) -> "Job":
        """Set the priority, -100 to 100, of a job that has not ended: jobs of higher priority get workers first."""
        return self._told(self._client.prioritise(self.id, priority))

    def rename(self, name: str) -> "Job":
        """Set the job's name. A job with an empty name is shown as `MODEL on DATASET`."""
        return self._told(self._client.rename(self.id, name))

    def edit(self, **changes: Any) -> "Job":
        """Change fields of the JobSpec: descriptive fields at any time, others only until the job has ended."""
        return self._told(self._client.edit(self.id, changes))

    def fork(self, version: int | str = "latest", *, optimizer: str | None = None, **changes: Any) -> "Job":
        """Create a job that starts from a version of this job.

        Args:
            version: a number, `latest` or `best`.
            optimizer: `kept` or `fresh`; by default the optimizer's state is kept if only lr and weight_decay change.
            changes: fields of the JobSpec that differ.
        """
        made = self._client.fork(self.id, version, {**changes}, optimizer)
        return Job(made, self._client, self._cache)

    def delete(self) -> None:
        """Delete the job, which must have ended, and its checkpoints."""
        self._client.delete(self.id)

    def workers(self) -> list[JobWorker]:
        """The workers that take or took part, active workers first."""
        return self._client.workers(self.id)

    def submissions(
        self, limit: int | None = 100, outcome: str | None = None, worker: str | None = None
    ) -> Iterator[Submission]:
        """Yield the workers' submissions and their outcomes, newest first.

        Args:
            limit: most submissions to yield; None: all.
            outcome: only this outcome: `accepted`, `stale`, `duplicate`, `lease_lost`, `fenced` or `refused`.
            worker: only submissions of the worker with this id.
        """
        return self._client.submissions(self.id, limit, outcome, worker)

    def generate(
        self,
        prompt: str = "\n",
        characters: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
        version: int | str = "latest",
    ) -> str:
        """The text with which a language model continues a prompt, generated by the control plane's evaluator; needs no
        torch here. `trained` loads the model itself, for longer texts.

        Args:
            temperature: 0: always the likeliest character; 1: as the model says.
            version: a number, `latest` or `best`.
        Raises Problem: no evaluator answers, or the model knows none of the prompt's characters.
        """
        return str(self._client.generate(self.id, prompt, characters, temperature, seed, version)["text"])

    def samples(self, limit: int | None = 100) -> Iterator[Sample]:
        """Yield short texts by the scored versions of a language model, newest first: what follows a line break, with
        the same draws for each version.

        Args:
            limit: most samples to yield; None: all.
        """
        return self._client.samples(self.id, limit)

    def checkpoints(self) -> list[Checkpoint]:
        """The versions whose weights can be loaded, newest first."""
        return self._client.checkpoints(self.id)

    def checkpoint(self, version: int | str = "latest") -> Checkpoint:
        """The entry of `checkpoints` for a number, `latest` or `best`. Raises Problem: there is none."""
        return weights.pick(self.checkpoints(), str(version), self.id)

    def classes(self, version: int | str = "latest") -> list[ClassScores]:
        """A classifier's precision, recall, F1 and support by class, and its confusion matrix, at a version.

        Returns: an entry for each part of the data that the version was scored on: `validation` or `test`.
        Raises: Problem: it has not been scored, or does not classify.
        """
        return self._client.classes(self.id, str(version))

    def ledger(self) -> list[EpochLedger]:
        """For each epoch, how many samples were counted, missing, reassigned or refused as duplicates."""
        return self._client.ledger(self.id)

    def estimate(self) -> Estimate:
        """The expected speed-up from one more worker; if there is no estimate, `reason` says why."""
        return self._client.estimate(self.id)

    def _task(self, recipe: Chosen) -> "Task":
        from computeshare.tasks import trained

        spec, folder = trained.spec_of_job(self.spec), self._cache.folder
        store = self._cache.bundles
        if spec.recipe is None:
            if spec.data and spec.data.tokens == "tokenizer":
                download(self._client.bundles, spec.data.bundle, store, (TOKENIZER,))
            return trained.task_of_job(self.spec, store)
        found = recipes.job_recipe(self._client, store, spec, recipe, [FROZEN])
        return recipes.task_of(spec, found, folder / "recipes" / found.bundle.digest.removeprefix(DIGEST))

    def _fetch(self, checkpoint: Checkpoint) -> Path:
        return self._cache.fetch(self._client, self.id, checkpoint)

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
