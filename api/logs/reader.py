"""Reads the lines of jobs' logs that the collector stored."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import Database, now_ms
from api.errors import no_job
from api.jobs.service import find
from api.schemas import LogLinePublic, LogPage
from api.tables import Job, LogLine
from computeshare.runtime.log_lines import Level, levels_from
from computeshare.types import ENDED

AT_ONCE = 500
"""Lines that a stream sends at a time."""
LINGER_MS = 3000
"""How long a log is followed after its job's end: workers, reducer and evaluator may still write to it."""


@dataclass(frozen=True, slots=True)
class Which:
    """A filter of log lines: by worker (id or name) and by lowest level."""

    worker: str | None = None
    level: Level | None = None


@dataclass(frozen=True, slots=True)
class LogNews:
    """Lines after a given id: `lines` pass the filter, `last` is the highest id covered, and `ended` is the job's final
    status once no more lines are expected.
    """

    lines: list[LogLinePublic]
    last: int
    ended: str | None


class Logs:
    """The lines of jobs' logs. `page` and `news` raise NotFound where there is no such job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(
        self, job_id: str, which: Which = Which(), after: int | None = None, before: int | None = None, limit: int = 100
    ) -> LogPage:
        """Lines in ascending order: the first with ids above `after`, or else the newest with ids below `before`."""
        query = _lines(job_id, which)
        if before is not None:
            query = query.where(col(LogLine.id) < before)
        with self._database.read() as session:
            find(session, job_id)
            if after is not None:
                query = query.where(col(LogLine.id) > after).order_by(col(LogLine.id))
                return LogPage(items=_found(session, query.limit(limit)), previous=None)
            newest = _found(session, query.order_by(col(LogLine.id).desc()).limit(limit + 1))
        items = newest[limit - 1 :: -1] if len(newest) > limit else newest[::-1]
        return LogPage(items=items, previous=items[0].id if len(newest) > limit else None)

    def news(self, job_id: str, which: Which, last: int, limit: int) -> LogNews:
        """At most `limit` lines with ids above `last`."""
        with self._database.read() as session:
            state = select(col(Job.status), col(Job.started_ms), col(Job.finished_ms)).where(col(Job.id) == job_id)
            job = session.execute(state).one_or_none()
            if job is None:
                raise no_job(job_id)
            newest = session.scalar(select(func.max(col(LogLine.id))).where(col(LogLine.job_id) == job_id)) or 0
            if newest <= last:
                return LogNews([], last, job.status if _is_over(job.status, job.started_ms, job.finished_ms) else None)
            query = _lines(job_id, which).where(col(LogLine.id) > last, col(LogLine.id) <= newest)
            lines = _found(session, query.order_by(col(LogLine.id)).limit(limit))
        return LogNews(lines, lines[-1].id if len(lines) == limit else newest, None)

    def writers(self, job_id: str) -> Sequence[tuple[str, str]]:
        """The log's writers as (id, newest name), sorted by name."""
        query = select(col(LogLine.worker), col(LogLine.name), func.max(col(LogLine.id)))
        query = query.where(col(LogLine.job_id) == job_id).group_by(col(LogLine.worker))
        with self._database.read() as session:
            rows = session.execute(query).all()
        return sorted(((row[0], row[1]) for row in rows), key=lambda one: (one[1], one[0]))


def _is_over(status: str, started_ms: int | None, finished_ms: int | None) -> bool:
    """Whether a job has ended and, if it ever started, `LINGER_MS` have passed since."""
    return status in ENDED and (started_ms is None or finished_ms is None or finished_ms < now_ms() - LINGER_MS)


def _lines(job_id: str, which: Which) -> Select[LogLine]:
    query = select(LogLine).where(col(LogLine.job_id) == job_id)
    if which.worker:
        query = query.where(or_(col(LogLine.worker) == which.worker, col(LogLine.name) == which.worker))
    if which.level and which.level != "debug":
        query = query.where(col(LogLine.level).in_(levels_from(which.level)))
    return query


def _found(session: Session, query: Select[LogLine]) -> list[LogLinePublic]:
    return [
        LogLinePublic(
            id=row.id or 0,
            at=row.at_ms,
            worker=row.worker,
            name=row.name,
            level=row.level,
            text=row.text,
            data=row.data,
        )
        for row in session.scalars(query)
    ]
