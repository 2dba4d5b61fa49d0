"""The position in a job's event stream across reconnections."""

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
    """The last event read, and the pause before the next attempt to connect."""

    last: int | None
    ended: bool = False
    pause_s: float = _SHORTEST_PAUSE_S

    @classmethod
    def of(cls, job: Job, after: int | None = None) -> Self:
        """Start after event `after`, else after the last event known to `job`.

        With `after` the stream counts as unfinished even if the job has ended: its last events are still to be read.
        """
        return cls(job.get("last_event_id"), job["status"] in ENDED) if after is None else cls(after)

    def saw(self, event: Event) -> None:
        """Record an event, and whether the job has ended with it. Raises Problem: the job was deleted."""
        if event.type == "deleted":
            raise Problem("the job was deleted", 404)
        self.last, self.pause_s = event.id or self.last, _SHORTEST_PAUSE_S
        if event.type == "job" and "status" in event.data:
            self.ended = event.data["status"] in ENDED

    def cut(self, error: NoServer | Problem) -> str:
        """The reason why a connection broke. The stream counts as unfinished again, even after the job's end.

        Raises Problem: the control plane refused the request.
        """
        self.ended = False
        return passing(error)

    def lost(self, reason: str) -> Event:
        """The event that tells readers of a connection that ended too early."""
        return Event(self.last or 0, "lost", {"reason": reason})

    def pause(self) -> float:
        """Seconds to wait before reconnecting: doubled each time up to 5 s, with jitter to spread the clients."""
        now, self.pause_s = self.pause_s, min(_LONGEST_PAUSE_S, 2 * self.pause_s)
        return random.uniform(0.5, 1) * now


def passing(error: NoServer | Problem) -> str:
    """The message of an outage. Raises Problem: a refusal (HTTP status below 500), which a retry would not change."""
    if isinstance(error, Problem) and error.status < 500:
        raise error
    return str(error)
