"""Bans of workers from jobs: a user can lift a ban; the next process of a banned worker's machine inherits it."""

from collections.abc import Callable

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects.sqlite import insert

from api.access.audit import record
from api.access.caller import author
from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.jobs.service import find
from api.tables import JOB, WORKER, Event, Outbox, WorkerStat
from computeshare.types import machine_of

OVER = ("completed", "cancelled")
"""Statuses of jobs that no worker will join again."""


class Bans:
    """Lifts bans. The reducer imposes bans; the outbox tells the broker that a ban was lifted."""

    def __init__(self, database: Database, wake: Callable[[], None] = lambda: None) -> None:
        self._database, self._wake = database, wake

    def lift(self, job_id: str, worker: str) -> None:
        """Lift the ban of a worker, and of all workers of its machine, and clear their strikes.

        Raises: NotFound: the job does not exist, or the worker never took part in it; Conflict: no ban to lift.
        """
        with self._database.write() as session:
            job = find(session, job_id)
            row = session.get(WorkerStat, (job_id, worker))
            if row is None:
                raise NotFound(f"no such worker took part in job {job_id}: see /v1/jobs/{job_id}/workers")
            if row.banned is None:
                raise Conflict(f"worker {worker} is not banned from job {job_id}")
            now = now_ms()
            alike = (WORKER.c.job_id == job_id) & WORKER.c.worker.startswith(machine_of(worker), autoescape=True)
            session.execute(update(WORKER).where(alike).values(banned=None, strikes=0))
            job.revision += 1
            job.updated_ms = now
            session.add(Outbox(job_id=job_id, kind="unban", payload={"worker": worker}, created_ms=now, due_ms=now))
            session.add(Event(job_id=job_id, type="unbanned", at_ms=now, data={"worker": worker, "by": author()}))
            record(session, "worker.unban", worker, job_id=job_id)
        self._wake()


def pass_on(connection: Connection, gone: str, new: str) -> None:
    """Move the bans of the process `gone` to `new`, the next process of the same machine."""
    query = select(WORKER.c.job_id, WORKER.c.name, WORKER.c.device, WORKER.c.strikes, WORKER.c.banned)
    query = query.join(JOB, JOB.c.id == WORKER.c.job_id).where(JOB.c.status.not_in(OVER))
    for row in connection.execute(query.where(WORKER.c.worker == gone, WORKER.c.banned.is_not(None))).all():
        ban = {"strikes": row.strikes, "banned": row.banned}
        own = {"job_id": row.job_id, "worker": new, "name": row.name, "device": row.device}
        own |= {"seen_ms": now_ms(), "left_ms": now_ms(), "left_reason": f"banned: {row.banned}"}
        keys = ["job_id", "worker"]
        connection.execute(insert(WORKER).values(own | ban).on_conflict_do_update(index_elements=keys, set_=ban))
        before = (WORKER.c.job_id == row.job_id) & (WORKER.c.worker == gone)
        connection.execute(update(WORKER).where(before).values(strikes=0, banned=None))
        connection.execute(update(JOB).where(JOB.c.id == row.job_id).values(revision=JOB.c.revision + 1))
