"""Following a job's events over as many connections as it takes."""

import random
from dataclasses import dataclass
from typing import Self

from computeshare.client.api.address import NoServer
from computeshare.client.api.models import Event, Job, Problem
from computeshare.types import ENDED

CLOSED = "the server closed the stream"
_LONGEST_PAUSE_S = 5.0
_SHORTEST_PAUSE_S = 0.25


@dataclass(slots=True)
class Course:
    """How far the events have been read, and how long to wait before asking again."""

    last: int | None
    ended: bool = False
    pause_s: float = _SHORTEST_PAUSE_S

    @classmethod
    def of(cls, job: Job, after: int | None = None) -> Self:
        """From where the job was seen last, or from the event `after` on, be the job's end behind that or not."""
        return cls(job.get("last_event_id"), job["status"] in ENDED) if after is None else cls(after)

    def saw(self, event: Event) -> None:
        """Take note of an event."""
        self.last, self.pause_s = event.id or self.last, _SHORTEST_PAUSE_S
        if event.type == "job" and "status" in event.data:
            self.ended = event.data["status"] in ENDED

    def cut(self, error: NoServer | Problem) -> str:
        """Why a connection broke off, be it behind the job's end, where more was to come. Raises Problem: a refusal."""
        self.ended = False
        return passing(error)

    def lost(self, reason: str) -> Event:
        """What those who follow are told when a connection ends too early."""
        return Event(self.last or 0, "lost", {"reason": reason})

    def pause(self) -> float:
        """Seconds to wait now; longer and longer, and never the same for all who wait."""
        now, self.pause_s = self.pause_s, min(_LONGEST_PAUSE_S, 2 * self.pause_s)
        return random.uniform(0.5, 1) * now


def passing(error: NoServer | Problem) -> str:
    """What to tell of an outage. Raises Problem: it is a refusal, which asking again does not change."""
    if isinstance(error, Problem) and error.status < 500:
        raise error
    return str(error)
