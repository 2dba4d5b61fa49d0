"""Loads a job, and stores the rows that follow from a batch of its events; repeated rows change nothing.

A fast job makes hundreds of events a second beside the training: the statements that run for every batch are plain SQL,
made once from the tables' columns.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

from pydantic_core import to_json
from sqlalchemy import Connection, bindparam, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlmodel import SQLModel

from api.database import now_ms
from api.projection.epochs import growth
from api.projection.events.job_projection import Changes, JobState
from api.projection.events.parser import OUTCOMES, Row
from api.stored_specs import plan_of
from api.tables import (
    WORKER,
    CheckpointRow,
    EpochStat,
    Event,
    Exchange,
    LedgerEntry,
    Machine,
    Outbox,
    Score,
    Submission,
    VersionRow,
    WorkerStat,
    table,
)
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec
from computeshare.types import ENDED

MOST_KINDS = 10
"""The most kinds of machine stored for a worker; the oldest kind is dropped first."""


def _inserting(model: type[SQLModel], verb: str = "INSERT OR IGNORE", without: Sequence[str] = ()) -> str:
    names = [column.name for column in table(model).c if column.name not in without]
    return f"{verb} INTO {table(model).name} ({', '.join(names)}) VALUES ({', '.join(f':{n}' for n in names)})"


def _adding(model: type[SQLModel], added: Sequence[str], latest: Sequence[str] = (), newest: Sequence[str] = ()) -> str:
    """SQL that inserts a row of counters or updates the stored row: adds the `added` columns, takes the maximum of the
    `latest` columns, and replaces the `newest` columns.
    """
    changes = [f"{name} = {name} + excluded.{name}" for name in added]
    changes += [f"{name} = MAX({name}, excluded.{name})" for name in latest]
    changes += [f"{name} = COALESCE(excluded.{name}, {name})" for name in newest]
    keys = ", ".join(column.name for column in table(model).primary_key)
    return f"{_inserting(model, 'INSERT')} ON CONFLICT ({keys}) DO UPDATE SET {', '.join(changes)}"


_INSERTS = {
    "versions": _inserting(VersionRow),
    "ledger": _inserting(LedgerEntry),
    "submissions": _inserting(Submission, without=["id"]),
    "checkpoints": _inserting(CheckpointRow),
    "scores": _inserting(Score, without=["tested"]),
    "events": _inserting(Event, without=["id"]),
}
_JSON = {"versions": "seconds", "submissions": "micro_batches", "events": "data", "scores": "own_metrics"}
_COUNT_WORKER = _adding(
    WorkerStat, (*OUTCOMES, "bytes_up", "bytes_down", "samples", "strikes"), ["seen_ms"], ["memory_bytes"]
)
_COUNT_EXCHANGE = _adding(Exchange, ("count",), newest=["distance"])
_COUNT_EPOCH = _adding(EpochStat, ("reassigned", "duplicates_refused", "counted", "covered"))
_BLANK_WORKER: Row = {column.name: None for column in WORKER.c} | {"name": "", "device": "", "samples_per_s": 0.0}
_BAN = "UPDATE worker_stat SET banned = :reason WHERE job_id = :job_id AND worker = :worker"
_UNFIT = (
    "INSERT INTO worker_stat (job_id, worker, name, device, seen_ms, left_ms, left_reason, unfit, memory_bytes, "
    "samples, samples_per_s, accepted, stale, duplicate, lease_lost, fenced, refused, strikes, bytes_up, bytes_down) "
    "VALUES (:job_id, :worker, :name, :device, :at_ms, :at_ms, :reason, :reason, :memory_bytes, "
    "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) "
    "ON CONFLICT (job_id, worker) DO UPDATE SET unfit = excluded.unfit, "
    "memory_bytes = COALESCE(excluded.memory_bytes, memory_bytes)"
)
_TESTED = "UPDATE score SET tested = :tested WHERE job_id = :job_id AND token = :token AND tested IS NULL"
_VOID = "UPDATE checkpoint SET voided = 1 WHERE job_id = :job_id AND token = :token"
_LEAVE = (
    update(WORKER)
    .where(WORKER.c.job_id == bindparam("job"), WORKER.c.worker == bindparam("who"))
    .where(WORKER.c.session == bindparam("its_session"))  # also where it was taken for dead before its goodbye was read
    .values(left_ms=bindparam("at"), left_reason=bindparam("why"), samples_per_s=0.0)
)


def load_job(connection: Connection, job_id: str) -> JobState | None:
    """The stored job; None if it was deleted."""
    row = connection.exec_driver_sql("SELECT * FROM job WHERE id = ?", (job_id,)).mappings().one_or_none()
    return JobState(job_id, _plan(row["spec"]), dict(row)) if row else None


@lru_cache(maxsize=100)
def _plan(spec: str) -> Plan:
    return plan_of(json.loads(spec))


def store_changes(connection: Connection, state: JobState, changes: Changes, was: str) -> None:
    """Store a batch's rows and the job's changed columns; `was` is the status before, so that an end is noted once."""
    _drop_repeated(connection, state.id, changes)
    if changes.ledger:
        for epoch, (counted, covered) in growth(connection, state.id, changes.ledger).items():
            row = changes.epoch(state.id, epoch)
            row["counted"], row["covered"] = counted, covered
    for name, statement in _INSERTS.items():
        if rows := getattr(changes, name):
            if document := _JSON.get(name):
                for row in rows:
                    row[document] = None if row[document] is None else to_json(row[document]).decode()
            connection.exec_driver_sql(statement, rows)
    for row in changes.presence:
        _present(connection, row)
    of_workers = [_BLANK_WORKER | row for row in changes.workers.values()]
    others = [(_COUNT_WORKER, of_workers), (_COUNT_EPOCH, [*changes.epochs.values()]), (_BAN, changes.bans)]
    others += [(_COUNT_EXCHANGE, [*changes.exchanges.values()])]
    others += [(_UNFIT, changes.unfit), (_VOID, changes.damaged)]
    for statement, rows in others:
        if rows:
            connection.exec_driver_sql(statement, rows)
    for row in changes.tested:
        _test(connection, row)
    for refusal in changes.refusals:
        _refuse(connection, state, refusal)
    if state["status"] in ENDED and was not in ENDED:
        _note_end(connection, state)
    save_job(connection, state)


def is_scored(connection: Connection, state: JobState, changes: Changes) -> bool:
    """Whether every checkpoint that the job wants scored has its score, counting the rows in `changes`."""
    saved, scores = table(CheckpointRow).c, table(Score).c
    query = select(saved.token, saved.version).where(saved.job_id == state.id, ~saved.voided)
    versions = {row.token: row.version for row in connection.execute(query)}
    versions |= {row["token"]: row["version"] for row in changes.checkpoints}
    settled = set(connection.scalars(select(scores.token).where(scores.job_id == state.id)))
    settled |= {row["token"] for row in (*changes.scores, *changes.damaged)}
    spec = JobSpec.model_validate_json(state["spec"])
    return not any(spec.wants_score(version) for token, version in versions.items() if token not in settled)


def add_versions(connection: Connection, changes: Changes) -> int:
    """Insert the versions and ledger entries that are not stored yet; returns the number of entries inserted."""
    for row in changes.versions:
        row["seconds"] = to_json(row["seconds"]).decode()
    if changes.versions:
        connection.exec_driver_sql(_INSERTS["versions"], changes.versions)
    return connection.exec_driver_sql(_INSERTS["ledger"], changes.ledger).rowcount if changes.ledger else 0


def save_job(connection: Connection, state: JobState) -> None:
    """Store the changed columns of the job."""
    if not state.changed:
        return
    columns = ", ".join(f"{name} = :{name}" for name in sorted(state.changed))
    values = {name: state[name] for name in state.changed} | {"id": state.id, "updated_ms": now_ms()}
    statement = f"UPDATE job SET {columns}, updated_ms = :updated_ms, revision = revision + 1 WHERE id = :id"
    connection.exec_driver_sql(statement, values)
    state.changed.clear()


def _drop_repeated(connection: Connection, job_id: str, changes: Changes) -> None:
    """Drop checkpoints and scores that are stored already, and add an event for each new one: evaluators and reducers
    repeat announcements that may have been lost.
    """
    for rows, known_rows, kind in (
        (changes.checkpoints, table(CheckpointRow), "checkpoint"),
        (changes.scores, table(Score), "scored"),
    ):
        if rows:
            columns = known_rows.c
            query = select(columns.token).where(columns.job_id == job_id)
            known = set(connection.scalars(query.where(columns.token.in_([row["token"] for row in rows]))))
            rows[:] = {row["token"]: row for row in rows if row["token"] not in known}.values()
            changes.events += [_shown(row, kind) for row in rows]


def _shown(row: Row, kind: str) -> Row:
    hidden = {"job_id", "at_ms", "voided", "incarnation", "sample"} | (
        set() if row.get("own_metrics") else {"own_metrics"}
    )
    data = {name: row[name] for name in row.keys() - hidden}
    return {"job_id": row["job_id"], "stream_id": None, "type": kind, "at_ms": row["at_ms"], "data": data}


def _test(connection: Connection, row: Row) -> None:
    """Complete a stored score with the test set's and add an event, unless that was done before."""
    if connection.exec_driver_sql(_TESTED, row).rowcount:
        connection.execute(insert(table(Event)), _shown(row, "tested") | {"data": row["data"]})


def _present(connection: Connection, row: Row) -> None:
    about = {"job_id": row["job_id"], "worker": row["worker"]}
    if not row["joined"]:
        names = {"job": row["job_id"], "who": row["worker"], "its_session": row["session"]}
        connection.execute(_LEAVE, names | {"at": row["at_ms"], "why": row["reason"]})
        return
    values = {name: row[name] for name in ("name", "device", "session", "seat", "memory_bytes")}
    mine = (WORKER.c.job_id == row["job_id"]) & (WORKER.c.worker == row["worker"])
    kinds = connection.scalar(select(WORKER.c.kinds).where(mine)) or []
    values["kinds"] = kinds if row["kind"] in kinds else [*kinds, row["kind"]][-MOST_KINDS:]
    values |= {"joined_ms": row["at_ms"], "seen_ms": row["at_ms"], "left_ms": None, "left_reason": None}
    machines = table(Machine).c
    person = select(machines.person).where(machines.worker == row["worker"]).scalar_subquery()
    statement = sqlite_insert(WORKER).values(about | values | {"person": person})
    values["person"] = func.coalesce(WORKER.c.person, statement.excluded.person)
    connection.execute(statement.on_conflict_do_update(index_elements=["job_id", "worker"], set_=values))


def _refuse(connection: Connection, state: JobState, refusal: Row) -> None:
    """Change a submission from accepted to refused, and the counters by one, however many micro-batches it had."""
    columns = table(Submission).c
    mine = (columns.job_id == state.id) & (columns.nonce == refusal["nonce"]) & (columns.outcome == "accepted")
    changed = connection.execute(
        update(table(Submission)).where(mine).values(outcome="refused", reason=refusal["reason"])
    ).rowcount
    if changed:
        state.add("accepted", -1)
        state.add("refused", 1)
    connection.execute(
        update(WORKER)
        .where(WORKER.c.job_id == state.id, WORKER.c.worker == refusal["worker"])
        .values(
            accepted=WORKER.c.accepted - changed,
            refused=WORKER.c.refused + changed,
            refused_reason=refusal["reason"],
        )
    )


def _note_end(connection: Connection, state: JobState) -> None:
    """Store the event and the outbox row of a job that has just ended."""
    now, status = now_ms(), state["status"]
    state["finished_ms"] = now
    to_do = {"job_id": state.id, "kind": "end", "payload": {"status": status}, "created_ms": now, "due_ms": now}
    connection.execute(insert(table(Outbox)), to_do)
    shown = {"reason": state["reason"], "error": state["error"]}
    event = {"job_id": state.id, "stream_id": None, "type": status, "at_ms": now, "data": shown}
    connection.execute(insert(table(Event)), event)
