"""After the broker came back older than it was: what is done again replaces what was lost."""

from sqlalchemy import Connection, func, insert, select, update

from api.projection.archive import samples_of_workers, unpack
from api.projection.epochs import recount
from api.projection.event_projection import JobState
from api.projection.projection_store import WORKER
from api.tables import Event, LedgerEntry, Submission, VersionRow, table
from computeshare.types import Token

LEDGER = table(LedgerEntry)


def goes_back(state: JobState, token: Token) -> bool:
    """Whether a version that has just been committed is not the one after the newest: the broker has lost some."""
    return bool(token.incarnation == state["incarnation"] and token.version <= state["version"])


def rewind(connection: Connection, state: JobState, token: Token, at_ms: int) -> None:
    """Void the rows of the versions from this one on, under other names: done again they may have the same tokens."""
    unpack(connection, state.id, state.plan.rounds_per_epoch, token.version)
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
    """What each worker has contributed, from the ledger's rows that stand, and the sums of those that are packed."""
    standing = select(LEDGER.c.worker, func.sum(LEDGER.c.samples)).group_by(LEDGER.c.worker)
    counted = samples_of_workers(connection, job_id)
    for worker, samples in connection.execute(standing.where(LEDGER.c.job_id == job_id, LEDGER.c.voided.is_(False))):
        counted[worker] += samples
    mine = update(WORKER).where(WORKER.c.job_id == job_id)
    connection.execute(mine.values(samples=0))
    for worker, samples in counted.items():
        connection.execute(mine.where(WORKER.c.worker == worker).values(samples=samples))
