"""Forgets the oldest fine-grained rows of long jobs. The ledger, versions and scores stay for good."""

from sqlalchemy import ColumnElement, Table, func, select, true

from api.database import Database
from api.tables import Event, Submission, table

KEPT = 100_000
SLICE = 5000
"""Rows deleted in one transaction: others must not wait long."""

SUBMISSIONS, EVENTS = table(Submission), table(Event)
FINE_GRAINED: tuple[tuple[Table, ColumnElement[bool]], ...] = (
    (SUBMISSIONS, true()),
    (EVENTS, EVENTS.c.type.in_(("version", "reassigned", "refused"))),
)


def thin(database: Database) -> int:
    """Keep each job's newest submissions and frequent events; returns how many rows were deleted."""
    deleted = 0
    for rows, which in FINE_GRAINED:
        query = select(rows.c.job_id, func.count()).where(which).group_by(rows.c.job_id)
        with database.engine.connect() as connection:
            long_jobs = connection.execute(query.having(func.count() > KEPT)).all()
        for job_id, count in long_jobs:
            for start in range(0, count - KEPT, SLICE):
                size = min(SLICE, count - KEPT - start)
                oldest = select(rows.c.id).where(rows.c.job_id == job_id, which).order_by(rows.c.id).limit(size)
                with database.writing() as connection:
                    deleted += connection.execute(rows.delete().where(rows.c.id.in_(oldest))).rowcount
    return deleted
