"""Streams of jobs' events to browsers: each job is read and encoded once for all its watchers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import structlog
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from api.errors import NotFound
from api.jobs.history import History
from api.jobs.service import Jobs
from api.schemas import EventPublic, JobPublic
from computeshare.errors import ComputeShareError
from computeshare.types import ENDED

LOOK_S, LONGEST_LOOK_S = 0.5, 2.0
"""Seconds between a feed's looks for changes: with few watchers, and at most."""
SENDS_PER_S = 200
"""Target for sends per second of all streams together: with more watchers, feeds look less often. A send takes about
0.1 ms of CPU time."""
WOKEN_AT_ONCE = 10
"""Watchers woken in a row before the event loop serves other requests."""
AT_ONCE = 500
"""The most events in one send."""
PING_S = 15.0
RECONNECT_MS = 1000

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Page:
    """Encoded events after a given id. `last`: the id of the page's last event; `more`: whether further events may
    follow.
    """

    data: bytes
    last: int
    more: bool


@dataclass
class Feed:
    """The shared stream state of one job. `turn` grows with every change and every ping; the other fields are of that
    turn.
    """

    job_id: str
    watchers: int = 0
    turn: int = 0
    revision: int = -1
    job: bytes = b""
    is_deleted: bool = False
    over: bool = False
    """This turn is the last: the job has ended or was deleted, or the server stops."""
    pages: dict[int, Page] = field(default_factory=dict)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    async def later_than(self, turn: int) -> int:
        """Wait until the feed's turn is later than `turn`, or the feed is over; return the feed's turn."""
        if self.turn <= turn and not self.over:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            await waiter
        return self.turn

    async def next_turn(self) -> None:
        """Begin the next turn and wake all waiting watchers."""
        self.turn += 1
        waiting, self.waiting = self.waiting, []
        for number, waiter in enumerate(waiting):
            if not waiter.done():  # else its watcher has gone
                waiter.set_result(None)
            if number % WOKEN_AT_ONCE == WOKEN_AT_ONCE - 1:
                await asyncio.sleep(0)


class Feeds:
    """The feeds of the jobs being watched. All methods run in the server's event loop.

    Args:
        told_job: a job as JSON, as these watchers see it.
        told_event: an event as they see it; None: they do not.
    """

    def __init__(
        self,
        jobs: Jobs,
        history: History,
        stopping: Callable[[], bool],
        told_job: Callable[[JobPublic], str] = JobPublic.model_dump_json,
        told_event: Callable[[EventPublic], EventPublic | None] = lambda event: event,
    ) -> None:
        self._jobs, self._history, self._stopping = jobs, history, stopping
        self._told_job, self._told_event = told_job, told_event
        self._feeds: dict[str, Feed] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def stream(self, job_id: str, last: int) -> AsyncIterator[bytes]:
        """Yield encoded snapshots of the job, and its events after the id `last`. Ends when the job has ended and all
        its events were sent, with an event `deleted` if the job is deleted before, or when the feed stops.
        """
        feed, turn, revision = self._join(job_id), 0, -1
        try:
            while True:
                turn = await feed.later_than(turn)
                over = feed.over
                if feed.is_deleted:
                    yield format_sse_event(data_str="{}", event="deleted")
                    return
                if feed.revision == revision:
                    if over:
                        return
                    yield KEEPALIVE_COMMENT
                    continue
                data, revision, more = feed.job, feed.revision, True
                while more and not self._stopping():
                    page = await self._page(feed, last)
                    yield data + page.data
                    data, last, more = b"", page.last, page.more
                if over:
                    return
        finally:
            feed.watchers -= 1

    def _join(self, job_id: str) -> Feed:
        feed = self._feeds.get(job_id)
        if feed is None or feed.over:
            feed = self._feeds[job_id] = Feed(job_id)
            reader = asyncio.create_task(self._follow(feed))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        feed.watchers += 1
        return feed

    async def _follow(self, feed: Feed) -> None:
        """Look for changes of the job while the feed has watchers; then remove the feed."""
        sent_at = time.monotonic()
        try:
            while feed.watchers and not self._stopping():
                if await self._has_changed(feed) or time.monotonic() - sent_at > PING_S:
                    sent_at = time.monotonic()
                    await feed.next_turn()
                if feed.over:
                    break
                await asyncio.sleep(self._pause_s())
        except NotFound:
            feed.is_deleted = True
        except Exception as error:  # a bug; the browsers reconnect
            log.error("cannot follow a job", job=feed.job_id, exc_info=error)
        finally:
            feed.over = True
            if self._feeds.get(feed.job_id) is feed:
                del self._feeds[feed.job_id]
            await feed.next_turn()

    async def _has_changed(self, feed: Feed) -> bool:
        """Read and encode the job if it has changed; returns whether it has. Raises NotFound."""
        try:
            revision = await run_in_threadpool(self._jobs.revision, feed.job_id)
            if revision == feed.revision:
                return False
            job = await run_in_threadpool(self._jobs.show, feed.job_id)
        except NotFound:
            raise
        except (SQLAlchemyError, ComputeShareError) as error:  # such as a locked database: the next look may succeed
            log.warning("cannot read a job", job=feed.job_id, error=str(error)[:300])
            return False
        feed.job = format_sse_event(data_str=self._told_job(job), event="job", retry=RECONNECT_MS)
        feed.pages.clear()
        feed.revision, feed.over = revision, job.status in ENDED
        return True

    async def _page(self, feed: Feed, last: int) -> Page:
        """The events after `last`, as of this turn; read once, then shared among watchers with the same `last`."""
        async with feed.reading:
            revision, found = feed.revision, feed.pages.get(last)
            if found is None:
                found = await run_in_threadpool(self._read, feed.job_id, last)
                if revision == feed.revision:
                    feed.pages[last] = found
            return found

    def _read(self, job_id: str, last: int) -> Page:
        events = self._history.events(job_id, last, AT_ONCE)
        data = [
            format_sse_event(data_str=event.model_dump_json(), event=event.type, id=str(event.id))
            for event in map(self._told_event, events)
            if event
        ]
        return Page(b"".join(data), events[-1].id if events else last, len(events) == AT_ONCE)

    def _pause_s(self) -> float:
        """Seconds until the next look: longer with more watchers."""
        watchers = sum(feed.watchers for feed in self._feeds.values())
        return min(LONGEST_LOOK_S, max(LOOK_S, watchers / SENDS_PER_S))
