"""Following a job's events over as many connections as it takes."""

import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from computeshare.answers import Event, Job, Problem
from computeshare.client.reaching import NoServer
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


class Follower:
    """Reads events in a thread of its own, so that whoever waits for one may give up or look elsewhere meanwhile.

    Usable as a context manager; after it, the thread ends with the next event or pause.
    """

    def __init__(self, follow: Callable[[threading.Event], Iterator[Event]]) -> None:
        self._follow = follow
        self._done = threading.Event()
        self._found: queue.Queue[Event | BaseException | Literal["end"]] = queue.Queue()

    def __enter__(self) -> Self:
        threading.Thread(target=self._read, name="events", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def next(self, timeout_s: float) -> Event | Literal["end"] | None:
        """The next event, `end` after the last one, None if there was none in time. Raises what following raises."""
        try:
            found = self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def _read(self) -> None:
        try:
            for event in self._follow(self._done):
                self._found.put(event)
            self._found.put("end")
        except BaseException as error:  # the waiting thread raises it
            self._found.put(error)
