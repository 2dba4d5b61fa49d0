"""Jobs: create, show, list, pause, resume, retry, cancel, delete."""

import hashlib
import json
import secrets
import shutil
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import Database, now_ms
from api.errors import Conflict, KeyReused, NotFound
from api.schemas import JobPage, JobPublic
from api.services.paging import next_cursor, page
from api.tables import ACTIVE, CheckpointRow, Event, IdempotencyKey, Job, Outbox, SeatRow, WorkerStat
from computeshare.spec import JobSpec
from computeshare.types import ENDED, JobStatus

_ALPHABET = string.ascii_lowercase + string.digits
LATE_MS = 60_000
"""A deleted job is purged a second time after this long: something of it may still have been at work."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a forked job starts from: `files` (token, sha256, bytes) are its own already, under `job_id`."""

    job_id: str
    fingerprint: str
    forked_from: dict[str, Any]
    files: dict[str, Any]


class Jobs:
    """Everything that changes a job on a user's word, and reading it back.

    Whatever has to happen outside SQLite is written to the outbox in the same transaction; `wake` tells the
    dispatcher that something is waiting. `before_delete` runs in the transaction that deletes a job and its timeline.
    """

    def __init__(
        self,
        database: Database,
        artifacts_dir: Path,
        wake: Callable[[], None] = lambda: None,
        before_delete: Callable[[Session], object] = lambda _: None,
    ) -> None:
        self._database = database
        self._before_delete = before_delete
        self._artifacts_dir = artifacts_dir
        self._wake = wake

    def create(self, spec: JobSpec, key: str | None = None, origin: Origin | None = None) -> JobPublic:
        """Store a job, once per idempotency key; its seats are handed out as workers come.

        Raises: KeyReused; Conflict if the key's job was deleted meanwhile.
        """
        document = spec.model_dump(mode="json")
        fingerprint = origin.fingerprint if origin else fingerprint_of(document)
        with self._database.write() as session:
            if known := session.get(IdempotencyKey, key) if key else None:
                return self._repeated(session, known, fingerprint)
            job = _new_job(spec, document)
            if origin:
                job.id, job.forked_from = origin.job_id, origin.forked_from
            session.add(job)
            session.flush()
            if origin:
                session.add(
                    CheckpointRow(job_id=job.id, version=0, incarnation=0, at_ms=job.created_ms, **origin.files)
                )
            session.add(Outbox(job_id=job.id, kind="open", created_ms=job.created_ms, due_ms=job.created_ms))
            session.add(Event(job_id=job.id, type="created", at_ms=job.created_ms, data=_beginning(job)))
            if key:
                session.add(IdempotencyKey(key=key, fingerprint=fingerprint, job_id=job.id, created_ms=job.created_ms))
            session.flush()
            answer = _show(session, job.id)
        self._wake()
        return answer

    def repeated(self, key: str, fingerprint: str) -> JobPublic | None:
        """The job that this idempotency key made, if any. Raises: KeyReused; Conflict if it was deleted meanwhile."""
        with self._database.read() as session:
            known = session.get(IdempotencyKey, key)
            return self._repeated(session, known, fingerprint) if known else None

    def show(self, job_id: str) -> JobPublic:
        """One job. Raises NotFound."""
        with self._database.read() as session:
            return _show(session, job_id)

    def revision(self, job_id: str) -> int:
        """A number that grows whenever the job changes. Raises NotFound."""
        with self._database.read() as session:
            found = session.scalar(select(col(Job.revision)).where(col(Job.id) == job_id))
        if found is None:
            raise NotFound(f"there is no job {job_id}")
        return found

    def list(
        self,
        statuses: Sequence[JobStatus] = (),
        queue: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """Jobs newest first, of these statuses (empty: any) and this queue. Raises BadCursor."""
        query = _jobs().order_by(col(Job.created_ms).desc(), col(Job.id).desc())
        if statuses:
            query = query.where(col(Job.status).in_(statuses))
        if queue is not None:
            query = query.where(col(Job.queue) == queue)
        with self._database.read() as session:
            rows = page(session, query, (int, str), cursor, limit)
            return JobPage(items=[_public(row) for row in rows], next_cursor=next_cursor(rows))

    def pause(self, job_id: str, after_round: bool = False) -> JobPublic:
        """Let a job rest: its workers leave, what they did stays. Raises NotFound, Conflict.

        Args:
            after_round: let a running job make its next version first.
        """

        def change(job: Job) -> str:
            if job.status not in ACTIVE:
                already = " already" if job.status == "paused" else ""
                raise Conflict(f"job {job_id} is {job.status}{already}: only a queued or running job can be paused")
            if later := after_round and job.status == "running":
                job.pause_after = job.version + 1
            else:
                job.status, job.reason, job.paused_ms, job.pause_after = "paused", "Paused by a user", now_ms(), None
            return "pausing" if later else "paused"

        return self._change(job_id, "pause", change)

    def resume(self, job_id: str) -> JobPublic:
        """Let a paused job go on where it was, or one that is about to pause go on after all.

        Raises: NotFound, Conflict.
        """

        def change(job: Job) -> str:
            if job.pause_after is not None and job.status == "running":
                job.pause_after = None
            elif job.status != "paused":
                raise Conflict(f"job {job_id} is {job.status}: only a paused job can be resumed")
            else:
                _requeue(job)
            return "resumed"

        return self._change(job_id, "resume", change)

    def retry(self, job_id: str) -> JobPublic:
        """Let a failed job go on from its last checkpoint. Raises NotFound, Conflict."""

        def change(job: Job) -> str:
            if job.status != "failed":
                raise Conflict(f"job {job_id} is {job.status}: only a failed job can be retried")
            _requeue(job)
            return "retried"

        return self._change(job_id, "retry", change)

    def cancel(self, job_id: str) -> JobPublic:
        """Stop a job for good; its workers leave within a round. Raises NotFound, Conflict."""
        with self._database.write() as session:
            job = find(session, job_id)
            if job.status in ENDED:
                raise Conflict(f"job {job_id} is {job.status} already: only a job that has not ended can be cancelled")
            end(session, job, "cancelled", reason="Cancelled by a user", error=None)
            session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended, and remove its checkpoints. Raises NotFound, Conflict."""
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
            session.delete(job)
        shutil.rmtree(self._artifacts_dir / job_id, ignore_errors=True)  # what fails here, the outbox repeats
        self._wake()

    def prioritise(self, job_id: str, priority: int) -> JobPublic:
        """Give a job that has not ended another priority. Raises NotFound, Conflict."""
        with self._database.write() as session:
            job = find(session, job_id)
            if job.status in ENDED:
                raise Conflict(f"job {job_id} is {job.status}: only a job that has not ended has use for a priority")
            before, now = job.priority, now_ms()
            if priority != before:
                job.spec = {**job.spec, "priority": priority}
                job.updated_ms = now
                job.revision += 1
                data = {"by": "a user", "before": before, "priority": priority}
                session.add(Event(job_id=job_id, type="prioritised", at_ms=now, data=data))
                session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    def _change(self, job_id: str, kind: str, change: Callable[[Job], str]) -> JobPublic:
        """Change a job's status on a user's word, with what is to be done about it.

        `change` returns the type of its entry in the timeline.
        """
        with self._database.write() as session:
            job = find(session, job_id)
            event = change(job)
            job.updated_ms = now = now_ms()
            job.revision += 1
            payload = {"incarnation": job.incarnation}  # what came after it must not be taken for what was meant
            session.add(Outbox(job_id=job_id, kind=kind, payload=payload, created_ms=now, due_ms=now))
            session.add(Event(job_id=job_id, type=event, at_ms=now, data={"by": "a user"}))
            session.flush()
            answer = _show(session, job_id)
        self._wake()
        return answer

    @staticmethod
    def _repeated(session: Session, known: IdempotencyKey, fingerprint: str) -> JobPublic:
        if known.fingerprint != fingerprint:
            raise KeyReused("this Idempotency-Key was used with another body: send a new key for a new job")
        try:
            return _show(session, known.job_id)
        except NotFound as error:
            raise Conflict(
                f"job {known.job_id}, made with this Idempotency-Key, was deleted: send a new key"
            ) from error


def find(session: Session, job_id: str) -> Job:
    """The job's row. Raises NotFound."""
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return job


def end(session: Session, job: Job, status: JobStatus, reason: str | None, error: str | None) -> None:
    """Write down that a job has ended, and what remains to be done about it outside SQLite."""
    now = now_ms()
    job.status, job.reason, job.error = status, reason, error
    job.finished_ms, job.updated_ms, job.pause_after = now, now, None
    job.revision += 1
    session.add(Outbox(job_id=job.id, kind="end", payload={"status": status}, created_ms=now, due_ms=now))
    session.add(Event(job_id=job.id, type=status, at_ms=now, data={"reason": reason, "error": error}))


def _requeue(job: Job) -> None:
    """Make a job wait for workers again, as if nothing had stopped it."""
    job.status, job.reason, job.error = "queued", _looking(job.queue), None
    job.paused_ms = job.finished_ms = job.purged_ms = job.pause_after = None


def _looking(queue: str) -> str:
    return f"Looking for workers on queue {queue}"


def new_id() -> str:
    """An id that no job has."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(8))


def fingerprint_of(document: object) -> str:
    """What tells whether a request is the same as one before: sha256 of its JSON."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _beginning(job: Job) -> dict[str, Any]:
    """What the timeline begins with."""
    return {"name": job.name} | ({"forked_from": job.forked_from} if job.forked_from else {})


def _new_job(spec: JobSpec, document: dict[str, Any]) -> Job:
    now = now_ms()
    return Job(
        id=new_id(),
        name=spec.name,
        queue=spec.queue,
        status="queued",
        reason=_looking(spec.queue),
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
        raise NotFound(f"there is no job {job_id}")
    return _public(row)


def _public(row: Any) -> JobPublic:
    """From a row of `_jobs`."""
    job, workers, last_event_id = row[:3]
    about = {"host": job.reducer_host, "pid": job.reducer_pid, "kind": job.reducer_kind or None}
    values = {name: getattr(job, name) for name in _SAME_NAMES}
    values["samples_per_s"] = job.samples_per_s if job.status == "running" else 0.0
    return JobPublic(
        **values,
        title=job.title,
        priority=job.priority,
        workers=0 if job.status in ENDED else workers,
        reducer=about if job.reducer_host else None,
        created_at=job.created_ms,
        started_at=job.started_ms,
        finished_at=job.finished_ms,
        paused_at=job.paused_ms if job.status == "paused" else None,
        updated_at=job.updated_ms,
        last_event_id=last_event_id,
    )


_SAME_NAMES = JobPublic.model_fields.keys() & Job.model_fields.keys()
