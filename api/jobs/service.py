"""Jobs: create, show, list, pause, resume, retry, cancel, delete."""

import contextlib
import hashlib
import json
import secrets
import shutil
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, object_session
from sqlmodel import col

from api import dataset_facts
from api.access.audit import Action, record
from api.access.caller import author
from api.database import Database, now_ms
from api.dataset_facts import NoOwnDatasets, OwnDatasets
from api.epsilon import epsilon
from api.errors import Conflict, InvalidFields, KeyReused, NotFound, no_job
from api.jobs.cursors import next_cursor, page
from api.jobs.job_list import ORDERS, Chosen
from api.recipes.trials import RecipeTrials
from api.schemas import JobPage, JobPublic
from api.stored_specs import plan_of
from api.tables import ACTIVE, PAUSED, CheckpointRow, Event, IdempotencyKey, Job, Outbox, Recipe, SeatRow, WorkerStat
from computeshare.jobspec.catalog import catalog, lacking_packages
from computeshare.jobspec.documents.fields import editable
from computeshare.jobspec.privacy import Privacy
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.facts import perplexity
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.jobspec.tasks.stored import is_language_model, metric_of
from computeshare.runtime.durability import Disk
from computeshare.types import ENDED, ID_LENGTH, JobSort, JobStatus

_ALPHABET = string.ascii_lowercase + string.digits
FEWEST_BYTES = 1 << 16
"""With fewer free bytes, the disk cannot hold any job's checkpoint."""
HOUR_MS = 3_600_000
EVERY = Chosen()
LATE_MS = 60_000
"""Milliseconds until a deleted job is purged a second time: a process of the job may still have been writing."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The start of a forked job: `job_id` is the new job's; its checkpoint's `files` (token, sha256, bytes) are in
    place.
    """

    job_id: str
    fingerprint: str
    forked_from: dict[str, Any]
    files: dict[str, Any]


class Jobs:
    """Creates, reads, changes and deletes jobs on users' requests.

    Actions outside SQLite are written to the outbox in the same transaction; `wake` tells the dispatcher to look there.
    `before_delete` runs in the transaction that deletes a job and its timeline. Folders of data sets are looked up in
    `data_dir`, the users' own in `datasets`. `trials` finds the facts of recipes; None: jobs must give them. `invited`
    tells whether invited machines serve a queue.
    """

    def __init__(
        self,
        database: Database,
        artifacts_dir: Path,
        wake: Callable[[], None] = lambda: None,
        before_delete: Callable[[Session], object] = lambda _: None,
        data_dir: Path = Path(),
        trials: RecipeTrials | None = None,
        datasets: OwnDatasets | None = None,
        invited: Callable[[str], bool] = lambda queue: False,
    ) -> None:
        self._database = database
        self._before_delete = before_delete
        self._artifacts_dir, self._data_dir, self._trials = artifacts_dir, data_dir, trials
        self._datasets = datasets or NoOwnDatasets()
        self._invited = invited
        self._wake = wake

    def create(self, spec: JobSpec, key: str | None = None, origin: Origin | None = None) -> JobPublic:
        """Store a job, once per idempotency key; the scheduler gives it workers as they become free.

        Raises: KeyReused: the key came with another body; Conflict: the key's job was deleted; InvalidFields: the data
        set needs a package that is not installed here, or as `completed`.
        """
        images = catalog().datasets.get(spec.dataset or "")
        if images and (lacking := lacking_packages(images.requires)):
            message = f"{spec.dataset} {lacking} here and on every worker"
            raise InvalidFields.at(message, "dataset")
        fingerprint = origin.fingerprint if origin else fingerprint_of(spec.model_dump(mode="json"))
        if key and spec.task.needs_facts and (known_job := self.repeated(key, fingerprint)):
            return known_job
        spec = self.completed(spec)
        document = spec.model_dump(mode="json")
        with self._database.write() as session:
            if known := session.get(IdempotencyKey, key) if key else None:
                return self._repeated(session, known, fingerprint)
            self.with_own_data(spec)  # it may have been removed meanwhile; now nobody can
            if spec.recipe and not _has_recipe(session, spec.recipe):
                raise InvalidFields.at("was deleted: add the recipe again", "recipe")
            job = _new_job(spec, document)
            if origin:
                job.id, job.forked_from = origin.job_id, origin.forked_from
            session.add(job)
            session.flush()
            if origin:
                session.add(
                    CheckpointRow(job_id=job.id, version=0, incarnation=0, at_ms=job.created_ms, **origin.files)
                )
            session.add(Event(job_id=job.id, type="created", at_ms=job.created_ms, data=_beginning(job)))
            record(session, "job.fork" if origin else "job.create", job.id, **_recorded(job))
            if key:
                session.add(IdempotencyKey(key=key, fingerprint=fingerprint, job_id=job.id, created_ms=job.created_ms))
            session.flush()
            answer = _show(session, job.id)
        self._wake()
        return answer

    def completed(self, spec: JobSpec) -> JobSpec:
        """The specification with the facts of its data set and recipe, and with its audits decided. Raises
        InvalidFields.
        """
        spec = dataset_facts.completed(spec, self._data_dir, self._datasets)
        spec = self._trials.completed(spec) if self._trials else spec
        return spec.with_audits(spec.audit is None and self._invited(spec.queue))

    def warnings(self, spec: JobSpec) -> list[str]:
        """Risks to a job with this specification, each with a remedy."""
        if spec.sharers or not self._invited(spec.queue):
            return []
        until = " before an audit finds it" if spec.with_audits(True).audit else ""
        return [
            f"Invited machines serve this queue, and a single bad machine can spoil this job{until}: to tolerate a "
            f"minority of them, {spec.strategy.remedy}"
        ]

    def with_own_data(self, spec: JobSpec) -> JobSpec:
        """The specification with the facts of its data set if a user added that, without looking elsewhere. Raises
        InvalidFields.
        """
        return dataset_facts.with_own_data(spec, self._datasets)

    def repeated(self, key: str, fingerprint: str) -> JobPublic | None:
        """The job created with this idempotency key, if any. Raises KeyReused, Conflict as `create`."""
        with self._database.read() as session:
            known = session.get(IdempotencyKey, key)
            return self._repeated(session, known, fingerprint) if known else None

    def show(self, job_id: str) -> JobPublic:
        """A job by its id. Raises NotFound."""
        with self._database.read() as session:
            return self._with_disk(_show(session, job_id))

    def _with_disk(self, job: JobPublic) -> JobPublic:
        """The job, with what only the disk of the checkpoints tells: that it takes none, which could not be stored."""
        if job.status in ACTIVE and (why := self._obstacle(4 * (job.parameters or 0))):
            return job.model_copy(update={"reason": f"No checkpoint can be written: {why}"})
        return job

    def _obstacle(self, bytes_needed: int = 0) -> str | None:
        """Why the disk of the checkpoints cannot take `bytes_needed`; None if it can."""
        with contextlib.suppress(OSError):
            return Disk.of(self._artifacts_dir).obstacle(max(bytes_needed, FEWEST_BYTES))
        return None

    def revision(self, job_id: str) -> int:
        """A number that changes whenever the job changes. Raises NotFound."""
        with self._database.read() as session:
            found = session.scalar(select(col(Job.revision)).where(col(Job.id) == job_id))
        if found is None:
            raise no_job(job_id)
        return -found - 1 if self._obstacle() else found

    def list(
        self,
        chosen: Chosen = EVERY,
        cursor: str | None = None,
        limit: int = 50,
        sort: JobSort = "newest",
    ) -> JobPage:
        """A page of the chosen jobs; a cursor is valid for its own `sort` only. Raises BadCursor."""
        order = ORDERS[sort]
        query = chosen.among(_jobs()).order_by(*order.columns)
        with self._database.read() as session:
            rows = page(session, query, order.kinds, cursor, limit, sort)
            items = [self._with_disk(_public(row)) for row in rows]
            return JobPage(items=items, next_cursor=next_cursor(rows, sort))

    def pause(self, job_id: str, after_round: bool = False, hours: float | None = None) -> JobPublic:
        """Pause a job: its workers leave, its progress is kept. Raises NotFound, Conflict.

        Args:
            after_round: let a running job make its next version first.
            hours: hours from now after which the job resumes by itself.
        """

        def change(job: Job) -> str:
            if job.status not in ACTIVE:
                already = " already" if job.status == "paused" else ""
                raise Conflict(f"job {job_id} is {job.status}{already}: only a queued or running job can be paused")
            job.resume_ms = None if hours is None else now_ms() + round(hours * HOUR_MS)
            if later := after_round and job.status == "running":
                job.pause_after, job.pause_by = job.version + 1, author()
            else:
                job.status, job.reason, job.reason_code = "paused", f"Paused by {author()}", "user"
                job.paused_ms, job.pause_after = now_ms(), None
            return "pausing" if later else "paused"

        return self._change(job_id, "pause", change, hours=hours)

    def resume(self, job_id: str, by: str | None = None) -> JobPublic:
        """Resume a paused job where it stopped, or cancel a pause that is to come after the round.

        Raises: NotFound, Conflict.
        """

        def change(job: Job) -> str:
            if job.pause_after is not None and job.status == "running":
                job.pause_after = job.resume_ms = None
            elif job.status != "paused":
                raise Conflict(f"job {job_id} is {job.status}: only a paused job can be resumed")
            else:
                _requeue(job)
            return "resumed"

        return self._change(job_id, "resume", change, by)

    def resume_due(self, now: int) -> None:
        """Resume the jobs whose time to resume (`resume_ms`) has come."""
        resting = col(Job.status).in_(("paused", *ACTIVE))
        with self._database.read() as session:
            due = session.scalars(select(col(Job.id)).where(resting, col(Job.resume_ms) <= now)).all()
        for job_id in due:
            with contextlib.suppress(NotFound, Conflict):  # a user was faster
                self.resume(job_id, "the clock")

    def retry(self, job_id: str) -> JobPublic:
        """Continue a failed job from its last checkpoint. Raises NotFound, Conflict."""

        def change(job: Job) -> str:
            if job.status != "failed":
                raise Conflict(f"job {job_id} is {job.status}: only a failed job can be retried")
            recipe, session = job.spec.get("recipe"), object_session(job)
            if recipe and session and not _has_recipe(session, recipe):
                raise Conflict(f"recipe {recipe} was deleted: add it again, then retry the job")
            _requeue(job)
            return "retried"

        return self._change(job_id, "retry", change)

    def cancel(self, job_id: str) -> JobPublic:
        """Stop a job for good; its workers leave within a round. Raises NotFound, Conflict."""
        with self._database.write() as session:
            job = find(session, job_id)
            if job.status in ENDED:
                raise Conflict(f"job {job_id} is already {job.status}: only a job that has not ended can be cancelled")
            end_job(session, job, "cancelled", reason=f"Cancelled by {author()}", error=None)
            record(session, "job.cancel", job_id)
            session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its history, its checkpoints, and the files that only it needed. Raises
        NotFound, Conflict.
        """
        with self._database.write() as session:
            job = find(session, job_id)
            if job.status not in ENDED:
                raise Conflict(f"job {job_id} is {job.status}: cancel it first, then delete it")
            now, held = now_ms(), (col(SeatRow.job_id) == job_id, col(SeatRow.ended_ms).is_(None))
            seats = list(session.scalars(select(col(SeatRow.id)).where(*held)))
            for due_ms in (now, now + LATE_MS):
                to_do = Outbox(job_id=job_id, kind="purge", payload={"seats": seats}, created_ms=now, due_ms=due_ms)
                session.add(to_do)
            self._before_delete(session)
            record(session, "job.delete", job_id, title=job.title)
            session.delete(job)
            session.flush()
            self._datasets.free(session, _bundles_of(job))
        shutil.rmtree(self._artifacts_dir / job_id, ignore_errors=True)  # if it fails, the outbox's `purge` repeats it
        self._wake()

    def update(self, job_id: str, **changes: Any) -> JobPublic:
        """Change fields of a job's specification (`editable`). Raises NotFound; Conflict: the job has ended and the
        field cannot change any more.
        """
        with self._database.write() as session:
            job = find(session, job_id)
            if job.status in ENDED and (late := changes.keys() & editable("active")):
                raise Conflict(
                    f"job {job_id} is {job.status}: change {', '.join(sorted(late))} only while a job has not ended"
                )
            changed = [field for field, value in changes.items() if _edit(session, job, field, value)]
            if changed:
                record(session, "job.edit", job_id, fields=changed)
            session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    def _change(
        self,
        job_id: str,
        kind: Literal["pause", "resume", "retry"],
        change: Callable[[Job], str],
        by: str | None = None,
        **detail: Any,
    ) -> JobPublic:
        """Change a job's row, and write the outbox entry `kind`, an event and an entry of the audit log, in one
        transaction.

        Args:
            change: edits the row and returns the event's type.
            by: the event's author; default: whoever makes the present request.
            detail: for the audit log.
        """
        action: Action = f"job.{kind}"  # type: ignore[assignment]  # a Literal of three, which are all actions
        with self._database.write() as session:
            job = find(session, job_id)
            event = change(job)
            job.updated_ms = now = now_ms()
            job.revision += 1
            payload = {"incarnation": job.incarnation}  # the request is for this incarnation, not for a later one
            session.add(Outbox(job_id=job_id, kind=kind, payload=payload, created_ms=now, due_ms=now))
            session.add(Event(job_id=job_id, type=event, at_ms=now, data={"by": by or author()}))
            record(session, action, job_id, **detail)
            session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    @staticmethod
    def _repeated(session: Session, known: IdempotencyKey, fingerprint: str) -> JobPublic:
        if known.fingerprint != fingerprint:
            raise KeyReused("this Idempotency-Key was used with another request body: send a new key for a new job")
        try:
            return _show(session, known.job_id)
        except NotFound as error:
            raise Conflict(
                f"job {known.job_id}, created with this Idempotency-Key, was deleted: send a new key"
            ) from error


def find(session: Session, job_id: str) -> Job:
    """The job's row. Raises NotFound."""
    job = session.get(Job, job_id)
    if job is None:
        raise no_job(job_id)
    return job


def _bundles_of(job: Job) -> list[str]:
    """The bundles that a job names, which another release may have created."""
    named = (job.spec.get("data") or {}).get("bundle"), (job.spec.get("recipe_facts") or {}).get("initial")
    return [digest for digest in named if digest]


def _has_recipe(session: Session, recipe: str) -> bool:
    """Whether a recipe can be published: it is stored, or belongs to a package of the workers' own."""
    return recipe.startswith(PACKAGE) or session.get(Recipe, recipe) is not None


def end_job(session: Session, job: Job, status: JobStatus, reason: str | None, error: str | None) -> None:
    """Store that a job has ended, with an event and the outbox entry `end`."""
    now = now_ms()
    job.stopped_ms += _stopped_ms(job, now)
    job.status, job.reason, job.error = status, reason, error
    job.finished_ms, job.updated_ms, job.pause_after, job.resume_ms = now, now, None, None
    job.revision += 1
    session.add(Outbox(job_id=job.id, kind="end", payload={"status": status}, created_ms=now, due_ms=now))
    session.add(Event(job_id=job.id, type=status, at_ms=now, data={"reason": reason, "error": error}))


def _edit(session: Session, job: Job, field: str, value: Any) -> bool:
    """Change a field of a job's specification and write an `edited` event, unless the value is the same; returns
    whether it was another.
    """
    before = job.spec.get(field, JobSpec.model_fields[field].default)
    before = list(before) if isinstance(before, tuple) else before  # as JSON has it
    if value == before:
        return False
    job.spec = {**job.spec, field: value}
    if field == "name":  # the list sorts and searches by it
        job.name = value
    job.updated_ms = now = now_ms()
    job.revision += 1
    data = {"by": author(), "field": field, "before": before, "after": value}
    session.add(Event(job_id=job.id, type="edited", at_ms=now, data=data))
    return True


def _requeue(job: Job) -> None:
    """Make a paused or failed job queued again."""
    job.stopped_ms += _stopped_ms(job, now_ms())
    job.status, job.reason, job.reason_code, job.error = "queued", _looking(job.queue), "looking", None
    job.missing_workers = 0
    job.paused_ms = job.finished_ms = job.purged_ms = job.pause_after = job.resume_ms = None


def _stopped_ms(job: Job, now: int) -> int:
    """Milliseconds since a started job was paused or failed; 0 in any other status."""
    since = {"paused": job.paused_ms, "failed": job.finished_ms}.get(job.status)
    return max(0, now - since) if since and job.started_ms else 0


def _looking(queue: str) -> str:
    return f"Looking for workers on queue {queue}"


def new_id() -> str:
    """A new random id, for a job or a webhook."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


def fingerprint_of(document: object) -> str:
    """sha256 of a request as JSON: equal for equal requests."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _beginning(job: Job) -> dict[str, Any]:
    """The data of a job's first event, `created`."""
    origin = {"forked_from": job.forked_from} if job.forked_from else {}
    return {"name": job.name, "by": author()} | origin


def _recorded(job: Job) -> dict[str, Any]:
    """The facts about a new job that go into the audit log."""
    origin = job.forked_from or {}
    return {"title": job.title} | {name: origin[name] for name in ("job_id", "version") if name in origin}


def _new_job(spec: JobSpec, document: dict[str, Any]) -> Job:
    now = now_ms()
    return Job(
        id=new_id(),
        name=spec.name,
        queue=spec.queue,
        status="queued",
        reason=_looking(spec.queue),
        reason_code="looking",
        spec=document,
        rounds_total=spec.rounds_total,
        created_ms=now,
        updated_ms=now,
    )


def _jobs() -> Select[Any]:
    """Jobs, each with the number of workers taking part and its newest event."""
    workers = (
        select(func.count())
        .where(col(WorkerStat.job_id) == Job.id, col(WorkerStat.left_ms).is_(None))
        .correlate(Job)
        .scalar_subquery()
    )
    newest = select(func.max(col(Event.id))).where(col(Event.job_id) == Job.id).correlate(Job).scalar_subquery()
    return select(Job, workers.label("workers"), func.coalesce(newest, 0).label("last_event_id"))


def _show(session: Session, job_id: str) -> JobPublic:
    row = session.execute(_jobs().where(col(Job.id) == job_id)).one_or_none()
    if row is None:
        raise no_job(job_id)
    return _public(row)


def _public(row: Any) -> JobPublic:
    """The public form of a row of `_jobs`."""
    job, workers, last_event_id = row[:3]
    about = {"host": job.reducer_host, "pid": job.reducer_pid, "kind": job.reducer_kind or None}
    values = {name: getattr(job, name) for name in _SAME_NAMES}
    if job.best_version == job.scored_version:
        values["tested_last"] = None
    values["samples_per_s"] = job.samples_per_s if job.status == "running" else 0.0
    if job.status not in ACTIVE or job.reason is None:
        paused = job.status == "paused" and job.reason_code in PAUSED
        values |= {"reason_code": job.reason_code if paused else None, "missing_workers": 0}
    return JobPublic(
        **values,
        title=job.title,
        metric=metric_of(job.spec),
        perplexity=perplexity(job.test_loss) if is_language_model(job.spec) else None,
        priority=job.priority,
        epochs_total=-(-job.rounds_total // plan_of(job.spec).rounds_per_epoch),
        workers=0 if job.status in ENDED else workers,
        **_epsilons(job),
        reducer=about if job.reducer_host else None,
        created_at=job.created_ms,
        started_at=job.started_ms,
        finished_at=job.finished_ms,
        paused_at=job.paused_ms if job.status == "paused" else None,
        resume_at=job.resume_ms,
        stopped_s=job.stopped_ms / 1000,
        left_s=_left_s(job),
        updated_at=job.updated_ms,
        last_event_id=last_event_id,
    )


def _epsilons(job: Job) -> dict[str, float | None]:
    """`epsilon` and `epsilon_total` of a job."""
    if not job.spec.get("privacy"):
        return {"epsilon": None, "epsilon_total": None}
    privacy, epoch = Privacy.model_validate(job.spec["privacy"]), plan_of(job.spec).rounds_per_epoch
    so_far, in_all = (epsilon(privacy, -(-rounds // epoch)) for rounds in (job.version, job.rounds_total))
    return {"epsilon": so_far, "epsilon_total": in_all}


def _left_s(job: Job) -> float | None:
    """Seconds for the remaining rounds at the present speed; None while the job does not progress."""
    if job.status != "running" or not job.samples_per_s:
        return None
    return (job.rounds_total - job.version) * plan_of(job.spec).samples_per_round / job.samples_per_s


_SAME_NAMES = JobPublic.model_fields.keys() & Job.model_fields.keys()
