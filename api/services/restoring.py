"""After a job went on from a checkpoint: undo what came after it, complete what the broker took with it."""

from dataclasses import dataclass

from sqlalchemy import Connection, Table, func, insert, select, update

from api.services.epochs import recount
from api.services.folding import JobState
from api.services.parsing import Row
from api.services.storing import WORKER
from api.tables import CheckpointRow, Event, LedgerEntry, Score, Submission, VersionRow, table
from computeshare.types import Token

LEDGER = table(LedgerEntry)
MOST_RECOVERED = 10_000


@dataclass(frozen=True, slots=True)
class Restored:
    """The version a job was opened at: a checkpoint's, or 0 where it has none."""

    token: Token
    at_ms: int


def restore(connection: Connection, state: JobState, restored: Restored) -> None:
    """Void the rows of versions that were lost, and bring the job's columns back in line with what stands."""
    token = restored.token
    for model in (VersionRow, LedgerEntry, CheckpointRow, Score):
        _void(connection, table(model), state.id, token)
    submissions = table(Submission).c
    connection.execute(
        update(table(Submission))
        .where(submissions.job_id == state.id, submissions.base_version >= token.version)
        .where(submissions.at_ms <= restored.at_ms, submissions.voided.is_(False))
        .values(voided=True)
    )
    completed = _complete_ledger(connection, state, restored)
    recount(connection, state.id, min([token.version // state.plan.rounds_per_epoch, *completed]))
    _recount_workers(connection, state.id, restored.at_ms)
    _recompute(connection, state, token)


def _void(connection: Connection, rows: Table, job_id: str, token: Token) -> None:
    lost = (rows.c.version > token.version) & (rows.c.incarnation < token.incarnation)
    connection.execute(update(rows).where(rows.c.job_id == job_id, lost).values(voided=True))


def _complete_ledger(connection: Connection, state: JobState, restored: Restored) -> list[int]:
    """Write down the micro-batches whose record was lost with the broker, though the checkpoint holds them.

    A version is only ever made of all micro-batches of its round, so the checkpoint of version v proves that every
    micro-batch before it counted once; who computed them is not known any more. Returns the epochs of what was lost.
    """
    plan, token = state.plan, restored.token
    stands = (LEDGER.c.job_id == state.id) & LEDGER.c.voided.is_(False)
    known = set(connection.scalars(select(LEDGER.c.version).where(stands).distinct()))
    about: Row = {
        "job_id": state.id,
        "token": str(token),
        "incarnation": token.incarnation,
        "worker": "",
        "voided": False,
    }

    if token.version - len(known) > MOST_RECOVERED:
        return []  # no outage loses so much: the ledger shows it as missing
    rows = []
    for version in (v for v in range(1, token.version + 1) if v not in known):
        done = plan.round(version - 1)
        about |= {"version": version, "epoch": done.epoch}
        rows += [
            about | {"micro_batch": m, "samples": plan.size(m)} for m in range(done.first, done.first + done.count)
        ]
    if rows:
        connection.execute(insert(LEDGER).prefix_with("OR IGNORE"), rows)
        data = {"version": token.version, "micro_batches": len(rows)}
        event = {"job_id": state.id, "type": "recovered", "at_ms": restored.at_ms, "data": data}
        connection.execute(insert(table(Event)), event)
    return [row["epoch"] for row in rows]


def _recount_workers(connection: Connection, job_id: str, at_ms: int) -> None:
    """Sessions ended with the broker, and samples of lost versions do not count."""
    counted = (
        select(func.coalesce(func.sum(LEDGER.c.samples), 0))
        .where(LEDGER.c.job_id == job_id, LEDGER.c.worker == WORKER.c.worker, LEDGER.c.voided.is_(False))
        .scalar_subquery()
    )
    mine = WORKER.c.job_id == job_id
    connection.execute(update(WORKER).where(mine).values(samples=counted))
    connection.execute(update(WORKER).where(mine, WORKER.c.banned.is_(None)).values(strikes=0))  # the broker lost them
    gone = {"left_ms": at_ms, "left_reason": "the broker lost the job's rounds", "samples_per_s": 0.0}
    connection.execute(update(WORKER).where(mine, WORKER.c.left_ms.is_(None)).values(gone))


def _recompute(connection: Connection, state: JobState, token: Token) -> None:
    """The job's columns about its versions, from the rows that stand."""
    versions, scores = table(VersionRow).c, table(Score).c
    last = connection.execute(
        select(versions.loss, versions.epoch)
        .where(versions.job_id == state.id, versions.version == token.version, versions.voided.is_(False))
        .limit(1)
    ).one_or_none()
    state["loss"] = last.loss if last else None
    state["epoch"] = max(0, token.version - 1) // state.plan.rounds_per_epoch
    state["durable_version"] = token.version
    standing = select(scores.version, scores.accuracy).where(scores.job_id == state.id, scores.voided.is_(False))
    newest = connection.execute(standing.order_by(scores.version.desc()).limit(1)).one_or_none()
    best = connection.execute(standing.order_by(scores.accuracy.desc(), scores.version).limit(1)).one_or_none()
    state["scored_version"], state["accuracy"] = (newest.version, newest.accuracy) if newest else (None, None)
    state["best_version"], state["best_accuracy"] = (best.version, best.accuracy) if best else (None, None)
