"""A rollback of the broker to an older state: the versions committed again replace the versions it lost."""

from collections import Counter

from sqlalchemy import Connection, func, insert, select, update

from api.projection.archive import samples_of_workers, unpack_rows
from api.projection.epochs import recount
from api.projection.events.job_projection import JobState
from api.tables import JOB, WORKER, Event, LedgerEntry, Submission, VersionRow, table
from computeshare.types import Token

LEDGER = table(LedgerEntry)


def goes_back(state: JobState, token: Token) -> bool:
    """Whether a newly committed version is not above the newest stored version: the broker has lost versions."""
    return bool(token.incarnation == state["incarnation"] and token.version <= state["version"])


def rewind(connection: Connection, state: JobState, token: Token, at_ms: int) -> None:
    """Void the rows from this version on and rename their tokens: versions committed again may have the same tokens."""
    unpack_rows(connection, state.id, state.plan.rounds_per_epoch, token.version)
    for rows in (table(VersionRow), LEDGER):
        lost = (rows.c.version >= token.version) & (rows.c.incarnation == token.incarnation) & rows.c.voided.is_(False)
        renamed = rows.c.token + f"~{at_ms}"
        connection.execute(update(rows).where(rows.c.job_id == state.id, lost).values(voided=True, token=renamed))
    recount(connection, state.id, (token.version - 1) // state.plan.rounds_per_epoch)
    submissions = table(Submission).c
    late = (submissions.base_version >= token.version) & (submissions.at_ms <= at_ms)
    connection.execute(update(table(Submission)).where(submissions.job_id == state.id, late).values(voided=True))
    recount_workers(connection, state.id)
    data = {"version": token.version - 1, "lost": state["version"]}
    event = {"job_id": state.id, "type": "went_back", "at_ms": at_ms, "data": data}
    connection.execute(insert(table(Event)), event)


def recount_workers(connection: Connection, job_id: str) -> None:
    """Recompute each worker's counted samples from the standing ledger rows and the sums of the packed blocks. The
    ledger names the leaders of chains alone: where a model is spread over workers, they keep their shares of the whole.
    """
    standing = select(LEDGER.c.worker, func.sum(LEDGER.c.samples)).group_by(LEDGER.c.worker)
    counted = samples_of_workers(connection, job_id)
    for worker, samples in connection.execute(standing.where(LEDGER.c.job_id == job_id, LEDGER.c.voided.is_(False))):
        counted[worker] += samples
    if connection.scalar(select(JOB.c.stages).where(JOB.c.id == job_id)):
        columns = select(WORKER.c.worker, WORKER.c.samples).where(WORKER.c.job_id == job_id)
        before = {row.worker: row.samples for row in connection.execute(columns)}
        whole, total = sum(before.values()) or 1, sum(counted.values())
        counted = Counter({worker: samples * total // whole for worker, samples in before.items()})
    mine = update(WORKER).where(WORKER.c.job_id == job_id)
    connection.execute(mine.values(samples=0))
    for worker, samples in counted.items():
        connection.execute(mine.where(WORKER.c.worker == worker).values(samples=samples))
