"""Forgets the oldest fine-grained rows of long jobs. The ledger, versions and scores stay for good."""

from sqlalchemy import ColumnElement, Connection, Table, func, select, true

from api.database import Database
from api.tables import Event, LogLine, Submission, table

KEPT = 100_000
LINES_KEPT = 20_000
"""Lines of a job's log."""
SLICE = 5000
"""Rows deleted in one transaction: others must not wait long."""

SUBMISSIONS, EVENTS, LINES = table(Submission), table(Event), table(LogLine)
FINE_GRAINED: tuple[tuple[Table, ColumnElement[bool]], ...] = (
    (SUBMISSIONS, true()),
    (EVENTS, EVENTS.c.type.in_(("version", "reassigned", "refused"))),
    (LINES, true()),
)


def thin(database: Database) -> int:
    """Keep each job's newest submissions, frequent events and lines of its log; returns how many rows were deleted."""
    deleted = 0
    for rows, which in FINE_GRAINED:
        kept = LINES_KEPT if rows is LINES else KEPT
        query = select(rows.c.job_id, func.count()).where(which).group_by(rows.c.job_id)
        with database.engine.connect() as connection:
            long_jobs = connection.execute(query.having(func.count() > kept)).all()
        for job_id, count in long_jobs:
            for start in range(0, count - kept, SLICE):
                size = min(SLICE, count - kept - start)
                oldest = select(rows.c.id).where(rows.c.job_id == job_id, which).order_by(rows.c.id).limit(size)
                with database.writing() as connection:
                    deleted += connection.execute(rows.delete().where(rows.c.id.in_(oldest))).rowcount
    return deleted


def thin_lines(connection: Connection, job_id: str) -> None:
    """Keep the newest lines of one job's log, of which not many can be too many."""
    mine = LINES.c.job_id == job_id
    newest = select(LINES.c.id).where(mine).order_by(LINES.c.id.desc())
    last_one_out = newest.offset(LINES_KEPT).limit(1).scalar_subquery()
    connection.execute(LINES.delete().where(mine, LINES.c.id <= last_one_out))
