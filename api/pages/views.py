"""The data of the pages, combined from the services that read jobs, history and submissions."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, get_args

from sqlalchemy import func, select
from sqlmodel import col

from api.database import Database
from api.errors import NotFound
from api.jobs.history import History
from api.jobs.job_list import Chosen
from api.jobs.series import Columns, Lowest
from api.jobs.service import Jobs
from api.jobs.submissions import Spent, Submissions
from api.pages.explanations import StartStep, bubble_remedy, first_steps, pace
from api.recipes.schemas import RecipeDetail
from api.recipes.service import Recipes
from api.schemas import (
    CheckpointPublic,
    ClassesPublic,
    EpochPublic,
    EstimatePublic,
    EventPublic,
    ExchangePublic,
    JobPublic,
    JobWorkerPublic,
    Metrics,
    SamplePublic,
    StagesPublic,
)
from api.stored_specs import plan_of
from api.tables import ACTIVE, Job
from api.text_format import rate
from computeshare.strategies.registry import stored
from computeshare.types import ENDED, JobSort, JobStatus, Outcome, plain

STATUSES: tuple[JobStatus, ...] = ("running", "queued", "paused", "completed", "failed", "cancelled")
"""In the order in which the list of jobs shows them."""
PER_PAGE = 50
MOST_RUNNING = 200
PLOT_POINTS = 1000
EPOCHS_SHOWN = 100
CHECKPOINTS_SHOWN = 100
TABLE_POINTS = 40
SAMPLES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class JobsView:
    """One page of the list of jobs. `counts`: jobs per status, of those that match the queue and the search text."""

    jobs: list[JobPublic]
    next_cursor: str | None
    counts: dict[JobStatus, int]
    first: bool
    curves: Mapping[str, Sequence[float]]
    """By job: its scores over its versions."""


SCORES = {"test_loss", "test_accuracy", "validation_loss", "validation_accuracy"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table "Plot data": the values at one version."""

    version: int
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    perplexity: float | None = None
    samples_per_s: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    staleness: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)
    """Of a recipe's own metrics, by name."""


@dataclass(frozen=True, slots=True)
class JobView:
    """The data of a job's page. `epochs` and `timeline` are newest first; `names` maps worker ids to names.

    `parent` is the title of the job from which this one was forked; None if there is none or it was deleted.
    """

    job: JobPublic
    workers: list[JobWorkerPublic]
    epochs: list[EpochPublic]
    timeline: list[EventPublic]
    checkpoints: list[CheckpointPublic]
    copy_error: str | None
    names: dict[str, str]
    rows: list[Row]
    samples: list[SamplePublic]
    parent: str | None
    spent: Sequence[Spent]
    estimate: EstimatePublic | None
    classes: ClassesPublic | None = None
    exchanges: Sequence[ExchangePublic] = ()
    """Who averaged with whom, where workers have weights of their own."""
    stages: Sequence[StagesPublic] = ()
    """Who holds which stages, where the model is spread over workers."""
    bubble: float | None = None
    """The share of the time of a micro-batch in which a worker waits for others."""
    trouble: str | None = None
    """The problem that keeps the control plane from running jobs; None: there is none."""

    @property
    def first_steps(self) -> list[StartStep]:
        """The steps before the first version; empty for a job that has a version, or has ended."""
        if self.job.version or self.job.status not in ACTIVE:
            return []
        return first_steps(self.job, self.trouble)

    @property
    def ended(self) -> bool:
        """Whether the job has completed, failed or been cancelled."""
        return self.job.status in ENDED

    @property
    def pace(self) -> str:
        """Why a running job is as fast as it is; empty: it does not run, or nothing was measured."""
        if self.job.status != "running":
            return ""
        codec = self.job.spec["codec"]
        up = codec["up"] if isinstance(codec, dict) else codec
        return pace(self.spent, stored(self.job.spec), plan_of(self.job.spec).units_per_round, up)

    @property
    def bubble_remedy(self) -> str:
        """What would shorten the bubble of a running job, as a sentence; empty: nothing would, or it has none."""
        staging = stored(self.job.spec).staging
        if self.bubble is None or staging is None or self.job.status != "running":
            return ""
        return bubble_remedy(self.bubble, staging.stages, self.job.spec["accumulate"])

    @property
    def to_download(self) -> CheckpointPublic | None:
        """The checkpoint that a completed job is about: the best version's, else the newest; None: it has none."""
        if self.job.status != "completed" or not self.checkpoints:
            return None
        return next((one for one in self.checkpoints if one.best), self.checkpoints[0])

    @property
    def chains(self) -> int:
        """The number of chains of workers that hold all stages."""
        return len({one.chain for one in self.stages})

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of submissions with each outcome, for outcomes that occurred."""
        found = {outcome: int(getattr(self.job, outcome)) for outcome in get_args(Outcome)}
        return {outcome: number for outcome, number in found.items() if number}

    @property
    def round_samples(self) -> int:
        """The number of samples in a full round."""
        return int(self.job.spec["micro_batch"] * self.job.spec["micro_batches_per_round"])

    @property
    def takes_late(self) -> bool:
        """Whether the strategy accepts stale updates, so that the page shows staleness."""
        strategy = stored(self.job.spec)
        return strategy.takes_any and not strategy.averaging

    @property
    def has_peers(self) -> bool:
        """Whether workers average weights of their own, so that the page shows how far they are apart."""
        return stored(self.job.spec).averaging is not None

    @property
    def meetings(self) -> list[list[ExchangePublic | None]]:
        """A row for each worker with its exchanges with each other worker, in the order of `workers`."""
        by_pair = {(one.worker, one.peer): one for one in self.exchanges}
        ids = [worker.id for worker in self.workers]
        return [[by_pair.get((worker, peer)) for peer in ids] for worker in ids]

    @property
    def most_exchanges(self) -> int:
        """Of one worker with another."""
        return max((one.count for one in self.exchanges), default=0)

    @property
    def rate_field(self) -> str:
        """The dotted path of the learning rate to tune, such as `optimizer.lr`."""
        return stored(self.job.spec).rate_field

    @property
    def stepper(self) -> dict[str, Any]:
        """The object with that learning rate: an optimizer, or a strategy, which gets its kind as `name`."""
        found: Any = self.job.spec
        for name in self.rate_field.split(".")[:-1]:
            found = found[name]
        return {"name": found.get("kind"), **found}

    def speed(self, now: datetime) -> str:
        """The job's speed as text: the current rounds per minute, or the average if the job has ended; may be empty."""
        if self.job.status == "running":
            return f"{rate(60 * self.job.samples_per_s / plan_of(self.job.spec).samples_per_round)} rounds a minute"
        if self.job.version and self.job.finished_at and (took_s := elapsed_s(self.job, now)):
            return f"{rate(60 * self.job.version / took_s)} rounds a minute on average"
        return ""


def elapsed_s(job: JobPublic, now: datetime) -> float:
    """Seconds from the first worker's joining to the job's end, or to now; pauses do not count."""
    if job.started_at is None:
        return 0.0
    return ((job.finished_at or job.paused_at or now) - job.started_at).total_seconds() - job.stopped_s


class Views:
    """Reads the data of the pages. Methods that take a job's id raise NotFound, unless they say otherwise."""

    def __init__(
        self,
        database: Database,
        jobs: Jobs,
        history: History,
        submissions: Submissions,
        recipes: Recipes,
        trouble: Callable[[], str | None],
    ) -> None:
        """`trouble` tells what keeps the control plane from running jobs."""
        self._database, self._jobs, self._history, self._submissions = database, jobs, history, submissions
        self._recipes, self._trouble = recipes, trouble

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read in one transaction: everything that services read within the block is from one moment."""
        with self._database.read():
            yield

    def jobs(self, chosen: Chosen, sort: JobSort | None = None, cursor: str | None = None) -> JobsView:
        """A page of the chosen jobs. Without `sort`, running jobs come first, then the newest. Raises BadCursor."""
        ahead: list[JobPublic] = []
        rest = chosen
        if sort is None and not chosen.statuses:
            rest = replace(chosen, statuses=STATUSES[1:])
            if not cursor:
                ahead = self._jobs.list(replace(chosen, statuses=STATUSES[:1]), limit=MOST_RUNNING).items
        page = self._jobs.list(rest, cursor, PER_PAGE, sort or "newest")
        found = ahead + page.items
        curves = self._history.curves(found)
        return JobsView(found, page.next_cursor, self._counts(chosen), cursor is None, curves)

    def job(self, job_id: str, table: bool, classes: bool = False) -> JobView:
        """The text and tables of a job's page; `rows`, the table "Plot data", and the scores by class of the best
        version are read only if asked for.
        """
        job = self._jobs.show(job_id)
        spent = self._submissions.spent(job_id)
        found, saved = self._history.workers(job_id), self._history.checkpoints(job_id)
        workers = found.items
        return JobView(
            job=job,
            workers=workers,
            exchanges=found.exchanges,
            stages=found.stages,
            bubble=found.bubble,
            epochs=self._history.ledger(job_id, EPOCHS_SHOWN).epochs[::-1],
            timeline=sorted(self._history.timeline(job_id), key=lambda event: (event.at, event.id), reverse=True),
            checkpoints=[c for n, c in enumerate(saved.items) if n < CHECKPOINTS_SHOWN or c.best],
            copy_error=saved.copy_error,
            names={worker.id: worker.name for worker in workers if worker.name},
            rows=self.table(job_id) if table else [],
            samples=self._history.samples_over_time(job_id, SAMPLES_SHOWN) if job.is_language_model else [],
            parent=self._parent(job),
            spent=spent,
            estimate=self._submissions.estimate(job_id, spent) if job.status == "running" else None,
            classes=self._classes(job_id) if classes else None,
            trouble=self._trouble(),
        )

    def _classes(self, job_id: str) -> ClassesPublic | None:
        with suppress(NotFound):
            return self._history.classes(job_id, "best")
        return None

    def _parent(self, job: JobPublic) -> str | None:
        try:
            return self._jobs.show(job.forked_from.job_id).title if job.forked_from else None
        except NotFound:
            return None

    def recipe(self, job: JobPublic) -> RecipeDetail | None:
        """The recipe that a job trains, with invisible characters of its files made visible; None: it trains none, one
        of a package, or one that was deleted.
        """
        try:
            found = self._recipes.show(job.spec.get("recipe") or "")
        except NotFound:
            return None
        return found.model_copy(update={"files": {path: plain(text, lines=True) for path, text in found.files.items()}})

    def job_alone(self, job_id: str) -> JobPublic:
        """The job without its workers, history and submissions."""
        return self._jobs.show(job_id)

    def plots(self, job_id: str, points: int = PLOT_POINTS) -> dict[str, Columns]:
        """The series to plot, thinned to about `points` values each."""
        return self._history.columns(job_id, points)

    def table(self, job_id: str) -> list[Row]:
        """The rows of the table "Plot data"."""
        return rows(self._history.metrics(job_id, points=TABLE_POINTS))

    def lowest_loss(self, job_id: str) -> Lowest | None:
        """The lowest test or validation loss and its version; None before the first score."""
        return self._history.lowest_loss(job_id)

    def title(self, job_id: str) -> str:
        """The job's title; its id if it was deleted."""
        try:
            return self._jobs.show(job_id).title
        except NotFound:
            return job_id

    def _counts(self, chosen: Chosen) -> dict[JobStatus, int]:
        query = select(col(Job.status), func.count()).group_by(col(Job.status))
        with self._database.read() as session:
            rows = session.execute(replace(chosen, statuses=()).among(query)).all()
        found = {row[0]: row[1] for row in rows}
        return {status: found[status] for status in STATUSES if status in found}


def rows(metrics: Metrics) -> list[Row]:
    """The series as rows, newest version first: about `TABLE_POINTS` scored versions, and others if few are scored."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    own: dict[int, dict[str, float]] = defaultdict(dict)
    for name in {one.name for one in fields(Row)} & Metrics.model_fields.keys():
        for point in getattr(metrics, name):
            values[point.version][name] = point.value
    for name, points in metrics.own_metrics.items():
        for point in points:
            own[point.version][name] = point.value
    with_score = {v for v, found in values.items() if found.keys() & SCORES}
    scored, unscored = _thinned(sorted(with_score, reverse=True)), sorted(values.keys() - with_score, reverse=True)
    others = _thinned(unscored) if len(scored) < TABLE_POINTS // 2 else []
    return [Row(v, own=own[v], **values[v]) for v in sorted({*scored, *others}, reverse=True)]


def _thinned(versions: list[int]) -> list[int]:
    """At most `TABLE_POINTS` of the versions, evenly spaced, with the first."""
    return versions[:: max(1, -(-len(versions) // TABLE_POINTS))]
