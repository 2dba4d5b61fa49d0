"""Reads a job's history: series, ledger, versions, workers, checkpoints, events."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import select
from sqlmodel import col

from api.database import Database
from api.errors import NotFound
from api.jobs import series
from api.jobs.cursors import next_cursor, page
from api.jobs.service import find
from api.jobs.versions import versions
from api.schemas import (
    CheckpointList,
    CheckpointPublic,
    ClassesPublic,
    ClassPublic,
    ClassScoresPublic,
    ConfusedPublic,
    EpochPublic,
    EventPublic,
    ExchangePublic,
    JobPublic,
    JobWorkerList,
    JobWorkerPublic,
    LedgerPublic,
    Metrics,
    SamplePage,
    SamplePublic,
    StagesPublic,
    VersionPage,
)
from api.stored_specs import plan_of
from api.tables import (
    TELLING,
    CheckpointRow,
    EpochStat,
    Event,
    Exchange,
    Score,
    WorkerStat,
    table,
)
from computeshare.checkpoints.copies import Record
from computeshare.checkpoints.store import AVERAGE, BEFORE, STATE, WEIGHTS, Artifacts
from computeshare.errors import ArtifactError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.registry import stored
from computeshare.tasks.class_counts import ClassCounts
from computeshare.types import ENDED, Token

EPOCH = table(EpochStat)
EVENTS_ON_PAGE = 200
MOST_CURVES = 2000
_EPOCH = ("epoch", "counted", "covered", "reassigned", "duplicates_refused")


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of a timeline, newest event first; `next_cursor` is None on the last page."""

    items: list[EventPublic]
    next_cursor: str | None


class History:
    """Reads the rows that the projector wrote. Every method about one job raises NotFound if there is no such job."""

    def __init__(self, database: Database, artifacts_dir: Path) -> None:
        self._database = database
        self._artifacts_dir = artifacts_dir
        self._curves: dict[str, tuple[int | None, list[float]]] = {}

    def metrics(self, job_id: str, since: int = 0, points: int = 1000, until: int | None = None) -> Metrics:
        """The job's series: versions above `since`, up to `until`, thinned evenly to about `points` values each."""
        with self._database.read() as session:
            return series.metrics(session, job_id, since, points, until)

    def columns(self, job_id: str, points: int) -> dict[str, series.Columns]:
        """The series that the plots show, as columns."""
        with self._database.read() as session:
            return series.columns(session, job_id, points)

    def lowest_loss(self, job_id: str) -> series.Lowest | None:
        """The lowest test loss of all versions, including versions that the plots leave out; None: no version was
        scored.
        """
        with self._database.read() as session:
            return series.lowest_loss(session, job_id)

    def curves(self, jobs: Sequence[JobPublic]) -> dict[str, list[float]]:
        """Each job's scores over its versions, as a small curve; read again only once a further version was scored."""
        if len(self._curves) > MOST_CURVES:
            self._curves.clear()
        found = {}
        with self._database.read() as session:
            for job in jobs:
                scored, values = self._curves.get(job.id, (None, []))
                if scored != job.scored_version:
                    values = series.curve(session, job.id, job.metric)
                    self._curves[job.id] = (job.scored_version, values)
                found[job.id] = values
        return found

    def csv(self, job_id: str) -> Iterator[str]:
        """The values of every version, as CSV text in pieces."""
        with self._database.read() as session:
            find(session, job_id)  # raises NotFound before the answer begins
        return series.as_csv(self._database, job_id)

    def ledger(self, job_id: str, newest: int | None = None) -> LedgerPublic:
        """How often each epoch's samples were counted; with `newest`, for that number of newest epochs only."""
        with self._database.read() as session:
            job = find(session, job_id)
            plan = plan_of(job.spec)
            owned = samples_owned(plan, job.version)
            unfinished = job.version // plan.rounds_per_epoch if stored(job.spec).takes_any else None
            first = max(0, len(owned) - newest) if newest else 0
            mine = (EPOCH.c.job_id == job_id) & (EPOCH.c.epoch >= first)
            stats = {row[0]: row[1:] for row in session.execute(select(*(EPOCH.c[n] for n in _EPOCH)).where(mine))}
        epochs = []
        for epoch, planned in enumerate(owned[first:], first):
            counted, covered, reassigned, refused = stats.get(epoch, (0, 0, 0, 0))
            samples = covered if epoch == unfinished else planned
            missing = max(0, samples - covered)
            epochs.append(
                EpochPublic(
                    epoch=epoch,
                    samples=samples,
                    counted=counted,
                    missing=missing,
                    reassigned=reassigned,
                    duplicates_refused=refused,
                )
            )
        return LedgerPublic(epochs=epochs)

    def versions(self, job_id: str, since: int = 0, limit: int = 100) -> VersionPage:
        """Up to `limit` standing versions above `since`, each with the micro-batches it was made of."""
        with self._database.read() as session:
            return versions(session, job_id, since, limit)

    def workers(self, job_id: str) -> JobWorkerList:
        """The workers that take or took part, active workers first."""
        with self._database.read() as session:
            job = find(session, job_id)
            rows = session.scalars(select(WorkerStat).where(col(WorkerStat.job_id) == job_id)).all()
            order = col(Exchange.worker), col(Exchange.peer)
            met = session.scalars(select(Exchange).where(col(Exchange.job_id) == job_id).order_by(*order)).all()
        total = sum(row.samples for row in rows) or 1
        items = [_job_worker(row, total, row.left_ms is None and job.status not in ENDED) for row in rows]
        exchanges = [ExchangePublic.model_validate(one, from_attributes=True) for one in met]
        items.sort(key=lambda w: (not w.active, w.name, w.id))
        stages = _stages(job.stages or {})
        busy = [one.busy for one in stages if one.busy is not None]
        bubble = 1 - sum(busy) / len(busy) if busy else None
        return JobWorkerList(items=items, exchanges=exchanges, stages=stages, bubble=bubble)

    def worker(self, job_id: str, worker: str) -> JobWorkerPublic:
        """A worker's part in the job, by its id. Raises NotFound."""
        for one in self.workers(job_id).items:
            if one.id == worker:
                return one
        raise NotFound(f"no such worker took part in job {job_id}: see /v1/jobs/{job_id}/workers")

    def checkpoints(self, job_id: str) -> CheckpointList:
        """The versions whose weights are on disk, newest first."""
        query = (
            select(
                *table(CheckpointRow).c, col(Score.accuracy), col(Score.loss), col(Score.tested), col(Score.own_metrics)
            )
            .outerjoin(Score, (col(Score.job_id) == CheckpointRow.job_id) & (col(Score.token) == CheckpointRow.token))
            .where(col(CheckpointRow.job_id) == job_id, ~col(CheckpointRow.voided))
            .order_by(col(CheckpointRow.version).desc(), col(CheckpointRow.incarnation).desc())
        )
        with self._database.read() as session:
            best = find(session, job_id).best_version
            rows = session.execute(query).all()
        there = [row for row in rows if self.weights_path(row).is_file()]
        record = Record.read(self._artifacts_dir / job_id)
        items = [_checkpoint(row, best, self._digest(row), row.token in record.files) for row in there]
        return CheckpointList(items=items, copy_error=record.error or None)

    def samples(self, job_id: str, cursor: str | None = None, limit: int = 50) -> SamplePage:
        """Texts by a language model's versions, newest version first. Raises BadCursor."""
        with self._database.read() as session:
            find(session, job_id)
            rows = page(session, _samples(job_id), (int, int), cursor, limit)
            return SamplePage(items=[_sample(row) for row in rows], next_cursor=next_cursor(rows))

    def samples_over_time(self, job_id: str, most: int) -> list[SamplePublic]:
        """At most `most` samples, newest first: the newest, the first and some evenly between them."""
        with self._database.read() as session:
            versions = [row.version for row in session.execute(_samples(job_id).with_only_columns(col(Score.version)))]
            last = len(versions) - 1
            chosen = {versions[last * place // max(1, most - 1)] for place in range(most)} if versions else set()
            rows = session.execute(_samples(job_id).where(col(Score.version).in_(chosen))) if chosen else ()
            return [_sample(row) for row in rows]

    def _digest(self, row: Any) -> str:
        """The digest of the weights to use of a checkpoint, as by `weights`."""
        with contextlib.suppress(ArtifactError):  # damaged: the download says so
            return self._average(row) or str(row.sha256)
        return str(row.sha256)

    def _average(self, row: Any) -> str:
        """The digest of a checkpoint's moving average; empty: it has none. Raises ArtifactError."""
        if not self.weights_path(row).with_name(AVERAGE).is_file():
            return ""
        return Artifacts(self._artifacts_dir, row.job_id).manifest(Token.parse(row.token)).average

    def checkpoint(self, job_id: str, which: str) -> tuple[Path, CheckpointRow]:
        """The path of a checkpoint's weights, and its row. `which`: a version's number, `latest` or `best`. Raises
        NotFound.
        """
        query = select(CheckpointRow).where(col(CheckpointRow.job_id) == job_id, ~col(CheckpointRow.voided))
        query = query.order_by(col(CheckpointRow.version).desc(), col(CheckpointRow.incarnation).desc())
        with self._database.read() as session:
            job = find(session, job_id)
            if which == "best" and job.best_version is None:
                raise NotFound(f"job {job_id} has no best version yet, because no version has been scored: use latest")
            if which != "latest":
                version = job.best_version if which == "best" else int(which)
                query = query.where(col(CheckpointRow.version) == version)
            rows = session.scalars(query).all()
        for row in rows:
            if (path := self.weights_path(row)).is_file():
                return path, row
        raise NotFound(
            f"job {job_id} has no checkpoint {which}: see /v1/jobs/{job_id}/checkpoints, or the job's page, for its "
            "checkpoints"
        )

    def weights(self, job_id: str, which: str, kind: Literal["average", "raw", "before"]) -> tuple[Path, str, int]:
        """The path of a checkpoint's weights, their digest, and their version; `which` as for `checkpoint`. Raises
        NotFound, ArtifactError.

        Args:
            kind: average: the moving average, if the job keeps one; raw: the version itself; before: the version before
                it, which is kept if the job has a delay or an overlap.
        """
        path, row = self.checkpoint(job_id, which)
        if kind == "before":
            digest = Artifacts(self._artifacts_dir, row.job_id).manifest(Token.parse(row.token)).before
            if not digest:
                raise NotFound(f"the version before version {row.version} of job {job_id} is not kept with it")
            return path.with_name(BEFORE), digest, row.version - 1
        if kind == "raw" or not (average := self._average(row)):
            return path, row.sha256, row.version
        return path.with_name(AVERAGE), average, row.version

    def state(self, job_id: str, which: str) -> Path:
        """The path of the reducer's state (optimizer included) of a version; `which` as for `checkpoint`. Raises
        NotFound.
        """
        weights, row = self.checkpoint(job_id, which)
        path = weights.with_name(STATE)
        if not path.is_file():
            raise NotFound(f"the state of version {row.version} of job {job_id} is missing: use another checkpoint")
        return path

    def classes(self, job_id: str, which: str) -> ClassesPublic:
        """The scores by class of a version; `which` as for `checkpoint`. Raises NotFound."""
        _, row = self.checkpoint(job_id, which)
        found = Artifacts(self._artifacts_dir, job_id).classes(Token.parse(row.token))
        try:
            parts = [_class_scores(part, ClassCounts.model_validate(counts)) for part, counts in found.items()]
        except ValidationError:
            parts = []
        if not parts:
            raise NotFound(
                f"version {row.version} of job {job_id} has no scores by class: it has not been scored, or it does not "
                f"classify"
            )
        return ClassesPublic(version=row.version, parts=parts)

    def weights_path(self, row: Any) -> Path:
        """The path of a checkpoint's weights; `row` is a row of the table `checkpoint`."""
        return self._artifacts_dir / str(row.job_id) / str(row.token) / WEIGHTS

    def events(self, job_id: str, after: int = 0, limit: int = 500) -> list[EventPublic]:
        """Up to `limit` events with an id above `after`, ascending."""
        query = select(Event).where(col(Event.job_id) == job_id)
        query = query.where(col(Event.id) > after).order_by(col(Event.id)).limit(limit)
        with self._database.read() as session:
            return [_event(row) for row in session.scalars(query)]

    def timeline(self, job_id: str, limit: int = 200) -> list[EventPublic]:
        """The newest entries of the timeline, newest first, without the versions."""
        query = select(Event).where(col(Event.job_id) == job_id, TELLING)
        with self._database.read() as session:
            return [_event(row) for row in session.scalars(query.order_by(col(Event.id).desc()).limit(limit))]

    def timeline_page(self, job_id: str, cursor: str | None = None, types: Collection[str] | None = None) -> EventPage:
        """A page of the whole timeline, including `version` events, newest first; with `types`, of these events alone.
        Raises BadCursor, NotFound.
        """
        query = select(Event).where(col(Event.job_id) == job_id).order_by(col(Event.id).desc())
        if types is not None:
            query = query.where(col(Event.type).in_(types), TELLING)
        with self._database.read() as session:
            find(session, job_id)
            rows = page(session, query, (int,), cursor, EVENTS_ON_PAGE)
            return EventPage([_event(row[0]) for row in rows], next_cursor(rows))


def samples_owned(plan: Plan, version: int) -> list[int]:
    """The planned samples per epoch, up to the round that made `version`."""
    full = plan.micro_batches_per_round * plan.micro_batch
    epochs = -(-version // plan.rounds_per_epoch)
    rounds = (min(plan.rounds_per_epoch, version - epoch * plan.rounds_per_epoch) for epoch in range(epochs))
    return [min(plan.samples, n * full) for n in rounds]


def _job_worker(row: WorkerStat, total: int, active: bool) -> JobWorkerPublic:
    names = (JobWorkerPublic.model_fields.keys() & WorkerStat.model_fields.keys()) - {"kinds"}
    values = {name: getattr(row, name) for name in names}
    values["samples_per_s"] = row.samples_per_s if active else 0.0
    return JobWorkerPublic(
        **values,
        id=row.worker,
        kinds=[kind for kind in row.kinds or [] if kind],
        active=active,
        share=row.samples / total,
        joined_at=row.joined_ms,
        left_at=row.left_ms,
        last_seen=row.seen_ms,
    )


def _event(row: Event) -> EventPublic:
    return EventPublic(id=row.id or 0, type=row.type, at=row.at_ms, data=row.data)


def _samples(job_id: str) -> Any:
    columns = (col(Score.version), col(Score.incarnation), col(Score.at_ms), col(Score.loss), col(Score.sample))
    mine = (col(Score.job_id) == job_id, ~col(Score.voided), col(Score.sample).is_not(None))
    return select(*columns).where(*mine).order_by(col(Score.version).desc(), col(Score.incarnation).desc())


def _sample(row: Any) -> SamplePublic:
    return SamplePublic(version=row.version, at=row.at_ms, loss=row.loss, text=row.sample)


def _checkpoint(row: Any, best: int | None, sha256: str, copied: bool) -> CheckpointPublic:
    return CheckpointPublic(
        version=row.version,
        token=row.token,
        sha256=sha256,
        bytes=row.bytes,
        at=row.at_ms,
        accuracy=row.accuracy,
        loss=row.loss,
        own_metrics=row.own_metrics,
        tested=row.tested,
        best=row.version == best,
        copied=copied,
        url=f"/v1/jobs/{row.job_id}/checkpoints/{row.version}",
    )


def _class_scores(part: str, counts: ClassCounts) -> ClassScoresPublic:
    names = counts.names or [None] * len(counts.support)
    scored = zip(counts.metrics, names, strict=True)
    classes = [ClassPublic(number=n, name=name, **asdict(one)) for n, (one, name) in enumerate(scored)]
    confused = [ConfusedPublic(actual=a, predicted=p, samples=samples) for a, p, samples in counts.confused]
    return ClassScoresPublic.model_validate(
        {
            "part": part,
            "samples": sum(counts.support),
            "classes": classes,
            "confusion": counts.confusion,
            "confused": confused,
        }
    )


def _stages(known: Mapping[str, Any]) -> list[StagesPublic]:
    """Who holds which stages, chain by chain, from the job's column."""
    found, courses = [], known.get("courses", {})
    for number, chain in enumerate(known.get("chains", ())):
        for held in chain:
            own, about = known["stages"][held["first"] : held["stop"]], known["workers"].get(held["worker"], {})
            found.append(
                StagesPublic(
                    **held,
                    chain=number,
                    layers=[layer for one in own for layer in one["layers"]],
                    parameters=sum(one["parameters"] for one in own),
                    busy=about.get("busy"),
                    course=courses.get(str(held["first"]), {}).get("points", []),
                    memory_bytes=about.get("memory_bytes"),
                    mail_bytes=about.get("mail_bytes"),
                )
            )
    return found
