"""A job's submissions: what became of each and why, where their seconds went, and what that says of the job's speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import Database
from api.jobs.cursors import next_cursor, page
from api.jobs.estimate import MeasuredRounds, MemberEstimate, one_more
from api.jobs.service import find
from api.schemas import EstimatePublic, SecondsPublic, SubmissionPage, SubmissionPublic
from api.stored_specs import plan_of
from api.tables import Job, Submission, VersionRow, WorkerStat
from computeshare.strategies.registry import stored
from computeshare.types import Outcome

NEWEST = 400
"""Number of newest submissions that describe how workers spend their time."""
ROUNDS = 20
SECONDS = ("waiting", "computing", "encoding", "uploading")


@dataclass(frozen=True, slots=True)
class Spent:
    """How a worker spent its time in its newest submissions; `units`: the number of work units in them."""

    worker: str
    submissions: int
    units: int
    seconds: SecondsPublic

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self.seconds, name) for name in SECONDS))

    @property
    def unit_s(self) -> float:
        """Seconds that a unit takes, all but the waiting."""
        return (self.total_s - self.seconds.waiting) / max(1, self.units)


class Submissions:
    """Reading submissions. Every method raises NotFound where there is no such job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self,
        job_id: str,
        outcome: Outcome | None = None,
        worker: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> SubmissionPage:
        """Submissions newest first; `worker` is an id or a name. Raises BadCursor."""
        query = select(Submission).where(col(Submission.job_id) == job_id).order_by(col(Submission.id).desc())
        if outcome is not None:
            query = query.where(col(Submission.outcome) == outcome)
            if outcome != "accepted":
                query = query.where(col(Submission.outcome) != "accepted")  # says that the partial index will do
        if worker is not None:
            named = select(col(WorkerStat.worker)).where(
                col(WorkerStat.job_id) == job_id, col(WorkerStat.name) == worker
            )
            query = query.where((col(Submission.worker) == worker) | col(Submission.worker).in_(named))
        with self._database.read() as session:
            folded = find(session, job_id).folded
            rows = page(session, query, (int,), cursor, limit)
            items = [_public(row[0]) for row in rows]
            return SubmissionPage(items=items, next_cursor=next_cursor(rows), folded=folded)

    def spent(self, job_id: str) -> Sequence[Spent]:
        """How workers spent their time recently, busiest worker first."""
        with self._database.read() as session:
            find(session, job_id)
            return _spent(session, job_id)

    def estimate(self, job_id: str, spent: Sequence[Spent] | None = None) -> EstimatePublic:
        """Estimate the speed with one more worker; `spent`: the result of `spent(job_id)`, read here if None."""
        with self._database.read() as session:
            job = find(session, job_id)
            if job.status != "running":
                return EstimatePublic(reason="The job is not running")
            found = one_more(_measured(session, job, _spent(session, job_id) if spent is None else spent))
        if isinstance(found, MemberEstimate):
            return EstimatePublic(low=found.low, likely=found.likely, high=found.high)
        return EstimatePublic(reason=found)


def _spent(session: Session, job_id: str) -> list[Spent]:
    newest = (
        select(Submission)
        .where(col(Submission.job_id) == job_id, col(Submission.outcome) == "accepted")
        .order_by(col(Submission.id).desc())
        .limit(NEWEST)
        .subquery()
    )
    sums = [func.sum(newest.c[f"{name}_s"]) for name in SECONDS]
    units = func.sum(func.json_array_length(newest.c.micro_batches))
    query = select(newest.c.worker, func.count(), units, *sums).group_by(newest.c.worker)
    found = [
        Spent(worker, count, held, SecondsPublic(**dict(zip(SECONDS, seconds, strict=True))))
        for worker, count, held, *seconds in session.execute(query)
    ]
    return sorted(found, key=lambda one: (-one.submissions, one.worker))


def _measured(session: Session, job: Job, spent: Sequence[Spent]) -> MeasuredRounds:
    """A running job's measurements since a worker last joined or left."""
    mine = (col(WorkerStat.job_id) == job.id) & col(WorkerStat.left_ms).is_(None)
    joined = session.execute(select(col(WorkerStat.worker), col(WorkerStat.joined_ms)).where(mine))
    present = {row.worker: row.joined_ms or 0 for row in joined}
    unit_s = [one.unit_s for one in spent if one.worker in present and one.unit_s > 0]
    versions = session.execute(
        select(col(VersionRow.version), col(VersionRow.at_ms))
        .where(col(VersionRow.job_id) == job.id, ~col(VersionRow.voided))
        .where(col(VersionRow.at_ms) > max(present.values(), default=0))
        .order_by(col(VersionRow.version).desc())
        .limit(ROUNDS + 1)
    ).all()
    rounds = versions[0].version - versions[-1].version if versions else 0
    strategy = stored(job.spec)
    return MeasuredRounds(
        unit_s=unit_s if len(unit_s) == len(present) else [],
        round_s=(versions[0].at_ms - versions[-1].at_ms) / 1000 / rounds if rounds else 0.0,
        rounds=rounds,
        units=plan_of(job.spec).units_per_round,
        most=job.spec["workers"]["max"],
        unit=strategy.unit,
        anyhow=not strategy.waits_for_slowest,
        stages=strategy.staging.stages if strategy.staging else 0,
    )


def _public(row: Submission) -> SubmissionPublic:
    seconds = SecondsPublic(
        waiting=row.waiting_s, computing=row.computing_s, encoding=row.encoding_s, uploading=row.uploading_s
    )
    names = SubmissionPublic.model_fields.keys() & Submission.model_fields.keys()
    return SubmissionPublic(**{name: getattr(row, name) for name in names}, at=row.at_ms, seconds=seconds)
