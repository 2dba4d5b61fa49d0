"""After a job went on from a checkpoint: void the rows of later versions, and add the rows that the broker lost."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import structlog
from pydantic_core import to_json
from sqlalchemy import Connection, func, insert, select, update

from api.projection.archive import unpack_rows
from api.projection.broker_rollback import recount_workers
from api.projection.epochs import recount
from api.projection.events.handlers import apply
from api.projection.events.job_projection import JobProjection, JobState
from api.projection.events.parser import StreamEvent
from api.projection.rates import JobRates
from api.projection.row_store import add_versions
from api.tables import WORKER, Event, Score, Submission, VersionRow, table
from computeshare.checkpoints.branch import ALL, Branch
from computeshare.protocol.versions.ledger import Entry as SavedVersion
from computeshare.protocol.versions.ledger import lineage
from computeshare.types import Token

_STANDS = """(version <= COALESCE(
  (SELECT value FROM json_each(:ends) WHERE CAST(key AS INTEGER) = incarnation),
  CASE WHEN incarnation >= :incarnation THEN :all ELSE :others END))"""
"""SQL: whether a row belongs to a branch, as `Branch.holds` decides for a token."""
_WRONG = f"job_id = :job AND instr(token, '~') = 0 AND voided = {_STANDS}"
"""SQL: rows voided though in the branch, or standing though not in the branch; without renamed rows (`~`)."""
_WRONG_VERSIONS = "SELECT token, epoch FROM version WHERE " + _WRONG
_LEDGER = f"""UPDATE ledger_entry SET voided = NOT {_STANDS}
WHERE job_id = :job AND token IN (SELECT value FROM json_each(:tokens))"""
_UNREADABLE = "SELECT json_extract(data, '$.token') FROM event WHERE job_id = :job AND type = 'damaged'"
_OTHERS = (
    "UPDATE version SET voided = NOT voided WHERE " + _WRONG,
    "UPDATE score SET voided = NOT voided WHERE " + _WRONG,
    f"UPDATE checkpoint SET voided = NOT voided WHERE {_WRONG} AND (NOT voided OR token NOT IN ({_UNREADABLE}))",
)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Restored:
    """The version at which a job was opened: a checkpoint's, or 0 if the job has no checkpoint."""

    token: Token
    at_ms: int


def restore(
    connection: Connection, state: JobState, restored: Restored, branch: Branch, saved: Iterable[SavedVersion]
) -> None:
    """Void the rows of lost versions, let the versions that led to the restored version stand, and recompute the job's
    columns from these.

    Args:
        branch: the versions that led to the restored version, according to the disk.
        saved: the entries of the ledgers stored beside the job's checkpoints.
    """
    token = restored.token
    led = lineage(saved, token)
    told = [Token.parse(entry["data"]["token"]).version for entry in led[:1]]  # the first of them
    unpack_rows(connection, state.id, state.plan.rounds_per_epoch, min([token.version, *told]), branch)
    first = _align(connection, state, branch)
    submissions = table(Submission).c
    connection.execute(
        update(table(Submission))
        .where(submissions.job_id == state.id, submissions.base_version >= token.version)
        .where(submissions.at_ms <= restored.at_ms, submissions.voided.is_(False))
        .values(voided=True)
    )
    recount(connection, state.id, min(first, _recover(connection, state, restored, led)))
    _recount_workers(connection, state.id, restored.at_ms)
    _recompute(connection, state, token)


def _align(connection: Connection, state: JobState, branch: Branch) -> int:
    """Let the rows of the branch's versions stand and void all others; returns the first epoch with a changed row."""
    names = {"job": state.id, "ends": json.dumps(branch.ends), "incarnation": branch.incarnation}
    names |= {"others": branch.others, "all": ALL}
    wrong = connection.exec_driver_sql(_WRONG_VERSIONS, names).all()
    connection.exec_driver_sql(_LEDGER, names | {"tokens": json.dumps([row.token for row in wrong])})
    for statement in _OTHERS:
        connection.exec_driver_sql(statement, names)
    return min((row.epoch for row in wrong), default=ALL)


def _recover(connection: Connection, state: JobState, restored: Restored, led: Iterable[SavedVersion]) -> int:
    """Add the versions whose events were lost with the broker, from the ledgers beside the checkpoints.

    Returns the first epoch whose ledger may have changed.
    """
    projection = JobProjection(JobState(state.id, state.plan, dict(state.columns)), JobRates())
    for entry in led:
        try:
            apply(projection, StreamEvent("", "version", min(int(entry["at"]), restored.at_ms), entry["data"]))
        except (KeyError, TypeError, ValueError) as error:
            log.warning("entry of a checkpoint's ledger passed over", job=state.id, error=repr(error)[:200])
    recovered = add_versions(connection, projection.changes)
    if recovered:
        data = {"version": restored.token.version, "micro_batches": recovered}
        event = {"job_id": state.id, "type": "recovered", "at_ms": restored.at_ms, "data": data}
        connection.execute(insert(table(Event)), event)
    first = restored.token.version // state.plan.rounds_per_epoch
    return min((int(row["epoch"]) for row in projection.changes.ledger), default=first) if recovered else first


def _recount_workers(connection: Connection, job_id: str, at_ms: int) -> None:
    """Recount workers' samples without the lost versions, and end all sessions: the broker lost them."""
    recount_workers(connection, job_id)
    mine = WORKER.c.job_id == job_id
    connection.execute(update(WORKER).where(mine, WORKER.c.banned.is_(None)).values(strikes=0))  # the broker lost them
    gone = {"left_ms": at_ms, "left_reason": "the broker lost the job's rounds", "samples_per_s": 0.0}
    connection.execute(update(WORKER).where(mine, WORKER.c.left_ms.is_(None)).values(gone))


def _recompute(connection: Connection, state: JobState, token: Token) -> None:
    """Recompute the job's columns about versions and scores from the rows that stand."""
    versions, scores = table(VersionRow).c, table(Score).c
    last = connection.execute(
        select(versions.loss, versions.epoch)
        .where(versions.job_id == state.id, versions.version == token.version, versions.voided.is_(False))
        .limit(1)
    ).one_or_none()
    state["loss"] = last.loss if last else None
    state["epoch"] = max(0, token.version - 1) // state.plan.rounds_per_epoch
    state["durable_version"] = token.version
    columns = (scores.version, scores.accuracy, scores.loss, scores.tested, scores.own_metrics)
    standing = select(*columns).where(scores.job_id == state.id, scores.voided.is_(False))
    better_first = func.coalesce(scores.accuracy, -scores.loss).desc().nulls_last()  # as `tasks.facts.goodness`
    newest = connection.execute(standing.order_by(scores.version.desc()).limit(1)).one_or_none()
    best = connection.execute(standing.order_by(better_first, scores.version).limit(1)).one_or_none()
    for row, names in (
        (newest, ("scored_version", "accuracy", "test_loss", "tested_last", "own_metrics")),
        (best, ("best_version", "best_accuracy", "best_loss", "tested")),
    ):
        for name, value in zip(names, row or repeat(None), strict=False):
            state[name] = to_json(value).decode() if isinstance(value, dict) else value
