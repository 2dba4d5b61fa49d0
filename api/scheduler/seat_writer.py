"""Seats in the database: the number that a job can use, and the storing of decisions about seats."""

import structlog
from sqlalchemy import Connection, func, insert, select, update

from api.publication.outbox import OUTBOX, SEAT
from api.scheduler.seat_planner import Action, Close, Issue, Leave
from api.tables import ACTIVE, JOB, Event, table
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import Seat

log = structlog.get_logger()


def seats_wanted(spec: JobSpec) -> int:
    """The number of workers that a job can use at a time."""
    return min(spec.workers.max, spec.strategy.most_workers(spec.plan))


def place(connection: Connection, action: Action, now: int) -> None:
    """Store one decision, with the outbox row or event that it needs."""
    match action:
        case Issue():
            _issue(connection, action, now)
        case Close():
            _close(connection, action, now)
        case Leave():
            _leave(connection, action, now)


def _issue(connection: Connection, issue: Issue, now: int) -> None:
    active = select(JOB.c.id).where(JOB.c.id == issue.job_id, JOB.c.status.in_(ACTIVE))
    if connection.execute(active).one_or_none() is None:
        return  # ended or paused meanwhile
    tried = select(func.coalesce(func.max(SEAT.c.attempt), 0)).where(SEAT.c.job_id == issue.job_id)
    attempt = 1 + connection.execute(tried.where(SEAT.c.number == issue.number)).scalar_one()
    seat = Seat(issue.worker, issue.job_id, issue.number, attempt)
    about = {"worker": seat.worker, "job_id": seat.job, "number": seat.number, "attempt": seat.attempt}
    connection.execute(insert(SEAT), about | {"id": seat.id, "state": "pending", "created_ms": now})
    _to_do(connection, seat, "seat", now)
    log.info("seat issued", seat=seat.id)


def _close(connection: Connection, close: Close, now: int) -> None:
    mine = (SEAT.c.id == close.seat_id) & SEAT.c.ended_ms.is_(None)
    changed = connection.execute(update(SEAT).where(mine).values(state=close.state, ended_ms=now)).rowcount
    log.info("seat over", seat=close.seat_id, state=close.state)
    if changed:
        _to_do(connection, Seat.parse(close.seat_id), "stop" if close.stop else "vacate", now)


def _leave(connection: Connection, leave: Leave, now: int) -> None:
    mine = (SEAT.c.id == leave.seat_id) & SEAT.c.ended_ms.is_(None) & SEAT.c.leaving_ms.is_(None)
    if connection.execute(update(SEAT).where(mine).values(leaving_ms=now, left_to=leave.to)).rowcount:
        seat = Seat.parse(leave.seat_id)
        log.info("seat to leave", seat=seat.id, why=leave.why, to=leave.to)
        if seat.scores:  # the timeline tells of training
            return
        about = {"worker": seat.worker, "why": leave.why, "to": leave.to}
        event = {"job_id": seat.job, "stream_id": None, "type": "recalled", "at_ms": now, "data": about}
        connection.execute(insert(table(Event)), event)
        changed = {"revision": JOB.c.revision + 1, "updated_ms": now}
        connection.execute(update(JOB).where(JOB.c.id == seat.job).values(changed))


def _to_do(connection: Connection, seat: Seat, kind: str, now: int) -> None:
    row = {"job_id": seat.job, "kind": kind, "payload": {"seat": seat.id}, "created_ms": now, "due_ms": now}
    connection.execute(insert(OUTBOX), row)
