"""Deletes the oldest fine-grained rows of long jobs. The ledger, versions and scores stay for good.

Of sessions that began and ended, the newest of each machine stay: others' hours do not depend on how often one joins.
"""

from sqlalchemy import ColumnElement, Connection, LargeBinary, Table, cast, func, or_, select, true

from api.database import Database
from api.tables import JOB, Event, LogLine, Submission, table
from computeshare.types import MACHINE_CHARACTERS

KEPT = 100_000
LINES_KEPT, LINE_BYTES_KEPT = 20_000, 10_000_000
"""The most lines of a job's log, and the most bytes of their texts and fields."""
SLICE = 5000
"""Rows deleted per transaction: other writers must not wait long."""

SUBMISSIONS, EVENTS, LINES = table(Submission), table(Event), table(LogLine)
MACHINE = func.substr(EVENTS.c.data["worker"].as_string(), 1, MACHINE_CHARACTERS)
FINE_GRAINED: tuple[tuple[Table, ColumnElement[bool], tuple[ColumnElement[str], ...]], ...] = (
    (SUBMISSIONS, true(), (SUBMISSIONS.c.job_id,)),
    (EVENTS, EVENTS.c.type.in_(("version", "reassigned", "refused", "folded")), (EVENTS.c.job_id,)),
    (EVENTS, EVENTS.c.type.in_(("joined", "left", "unfit")), (EVENTS.c.job_id, MACHINE)),
)
"""Of a table, which rows, and what those have in common of which the newest `KEPT` stay."""


def thin(database: Database) -> int:
    """Keep each job's newest submissions, frequent events and log lines; returns the number of deleted rows."""
    deleted = 0
    for rows, which, common in FINE_GRAINED:
        query = select(func.count(), *common).where(which).group_by(*common)
        with database.engine.connect() as connection:
            long = connection.execute(query.having(func.count() > KEPT)).all()
        for count, *values in long:
            mine = [which, *(column == value for column, value in zip(common, values, strict=True))]
            for start in range(0, count - KEPT, SLICE):
                size = min(SLICE, count - KEPT - start)
                oldest = select(rows.c.id).where(*mine).order_by(rows.c.id).limit(size)
                with database.writing() as connection:
                    deleted += connection.execute(rows.delete().where(rows.c.id.in_(oldest))).rowcount
    with database.engine.connect() as connection:
        open_jobs = connection.scalars(select(JOB.c.id).where(JOB.c.purged_ms.is_(None))).all()
    for job_id in open_jobs:  # the logs of other jobs do not grow
        with database.writing() as connection:
            deleted += thin_lines(connection, job_id)
    return deleted


def thin_lines(connection: Connection, job_id: str) -> int:
    """Keep a job's newest log lines, within the limits of lines and bytes; returns the number of deleted lines."""
    mine, newest = LINES.c.job_id == job_id, LINES.c.id.desc()
    size = func.length(cast(LINES.c.text, LargeBinary)) + func.length(cast(LINES.c.data, LargeBinary))
    count, size_up_to = func.count().over(order_by=newest), func.sum(size).over(order_by=newest)
    lines = select(LINES.c.id, count.label("count"), size_up_to.label("bytes")).where(mine).subquery()
    too_many = or_(lines.c.count > LINES_KEPT, lines.c.bytes > LINE_BYTES_KEPT)
    last_one_out = select(func.max(lines.c.id)).where(too_many).scalar_subquery()
    return connection.execute(LINES.delete().where(mine, LINES.c.id <= last_one_out)).rowcount
