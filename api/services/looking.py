"""What is new in a job, worked out once for however many are watching it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from api.services.history import History
from api.services.jobs import Jobs
from computeshare.types import ENDED

AT_ONCE = 500
"""Events that are told at a time."""
KEPT = 256


@dataclass(frozen=True, slots=True)
class Told:
    """An event as it is sent."""

    id: int
    type: str
    json: str


@dataclass(frozen=True, slots=True)
class News:
    """A job at one revision, and the events after those that are known; `more` if that is not all of them."""

    job_json: str
    ended: bool
    events: Sequence[Told]

    @property
    def more(self) -> bool:
        return len(self.events) == AT_ONCE


class Looks:
    """Those who watch a job ask at about the same time for the same: it is read and written as JSON once."""

    def __init__(self, jobs: Jobs, history: History) -> None:
        self._jobs, self._history = jobs, history
        self._lock = threading.Lock()
        self._remembered = lru_cache(KEPT)(self._read)

    def revision(self, job_id: str) -> int:
        """Grows with every change. Raises NotFound."""
        return self._jobs.revision(job_id)

    def news(self, job_id: str, revision: int, last: int) -> News:
        """The job, which has come to this revision, and its events after `last`. Raises NotFound."""
        with self._lock:  # who comes second finds what the first has read
            return self._remembered(job_id, revision, last)

    def _read(self, job_id: str, _revision: int, last: int) -> News:
        job, events = self._jobs.show(job_id), self._history.events(job_id, last, AT_ONCE)
        told = [Told(event.id, event.type, event.model_dump_json()) for event in events]
        return News(job.model_dump_json(), job.status in ENDED, told)
