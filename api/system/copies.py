"""Copies the newest and the best checkpoint of every job to the address of `COMPUTESHARE_COPY_TO`."""

import contextlib
import threading
import time
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlmodel import col

from api.database import Database
from api.errors import NotFound
from api.jobs.history import History
from api.tables import Job
from computeshare.checkpoints import copies

RETRY_S = 60.0
"""Seconds from a failed copy to the next try."""

log = structlog.get_logger()


class Copies:
    """Looks at the jobs that have changed since the last turn; a background loop calls `step`."""

    def __init__(self, database: Database, artifacts_dir: Path, address: str | None, stop: threading.Event) -> None:
        self._database, self._artifacts_dir = database, artifacts_dir
        self._address, self._stop = address, stop
        self._history = History(database, artifacts_dir)
        self._seen: dict[str, int] = {}
        """The revision at which each job was looked at."""
        self._not_before: dict[str, float] = {}

    def step(self) -> None:
        """Copy what has no copy yet. A failure is recorded, and tried again after `RETRY_S`; jobs run on."""
        if self._address is None:
            return
        with self._database.read() as session:
            revisions = {row.id: row.revision for row in session.execute(select(col(Job.id), col(Job.revision)))}
        self._seen = {job_id: at for job_id, at in self._seen.items() if job_id in revisions}
        self._not_before = {job_id: at for job_id, at in self._not_before.items() if job_id in revisions}
        for job_id, revision in revisions.items():
            if self._stop.is_set():
                return
            if self._seen.get(job_id) != revision and time.monotonic() >= self._not_before.get(job_id, 0.0):
                self._copy(job_id, self._address, revision)

    def _copy(self, job_id: str, address: str, revision: int) -> None:
        with contextlib.suppress(NotFound):  # deleted meanwhile
            found = self._history.checkpoints(job_id).items
            tokens = list(dict.fromkeys([one.token for one in found if one.best or one is found[0]]))
            try:
                if tokens:
                    copies.copy(self._artifacts_dir / job_id, tokens, address)
            except Exception as error:  # of any file system: the others' jobs can be copied
                self._not_before[job_id] = time.monotonic() + RETRY_S
                log.warning("cannot copy a checkpoint", job=job_id, error=f"{type(error).__name__}: {error}"[:300])
            else:
                self._seen[job_id] = revision
                self._not_before.pop(job_id, None)
