"""Lifting the ban of a worker from a job, on a user's word."""

from collections.abc import Callable

from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.services.jobs import find
from api.tables import Event, Outbox, WorkerStat


class Bans:
    """A ban is the reducer's to impose and a user's to lift; the outbox tells the broker."""

    def __init__(self, database: Database, wake: Callable[[], None] = lambda: None) -> None:
        self._database, self._wake = database, wake

    def lift(self, job_id: str, worker: str) -> None:
        """Let a banned worker take part again, its strikes forgotten. Raises NotFound, Conflict."""
        with self._database.write() as session:
            job = find(session, job_id)
            row = session.get(WorkerStat, (job_id, worker))
            if row is None:
                raise NotFound(f"no such worker took part in job {job_id}: see /v1/jobs/{job_id}/workers")
            if row.banned is None:
                raise Conflict(f"worker {worker} is not banned from job {job_id}: there is nothing to lift")
            now = now_ms()
            row.banned, row.strikes = None, 0
            job.revision += 1
            job.updated_ms = now
            session.add(Outbox(job_id=job_id, kind="unban", payload={"worker": worker}, created_ms=now, due_ms=now))
            session.add(Event(job_id=job_id, type="unbanned", at_ms=now, data={"worker": worker, "by": "a user"}))
        self._wake()
