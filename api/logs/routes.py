"""The log of a job: by pages, and live."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api.deps import LogsDep, Services, ServicesDep
from api.errors import NotFound
from api.jobs.event_feeds import LOOK_S, PING_S, RECONNECT_MS
from api.jobs.event_routes import AS_EVENTS, EventId, EventStream, existing
from api.jobs.routes import JobId
from api.logs.reader import AT_ONCE, LogNews, Which
from api.schemas import LogPage
from computeshare.runtime.log_lines import Level

Worker = Annotated[str | None, Query(max_length=100, description="only lines of this worker: its id or name")]
AtLeast = Annotated[Level | None, Query(description="only lines of at least this level")]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("/{job_id}/logs")
def job_logs(
    job_id: JobId,
    service: LogsDep,
    worker: Worker = None,
    level: AtLeast = None,
    after: Annotated[
        int | None, Query(ge=0, lt=2**53, description="the first lines after this id, instead of the newest lines")
    ] = None,
    before: Annotated[int | None, Query(ge=0, lt=2**53, description="only lines before this id")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="lines on a page")] = 100,
) -> LogPage:
    """Lines about a job from its workers, reducer and evaluator, also after these have left: in ascending order, the
    newest lines unless `after` is given.
    """
    return service.page(job_id, Which(worker, level), after, before, limit)


@router.get("/{job_id}/logs/stream", response_class=EventStream, responses=AS_EVENTS)
async def follow_job_logs(
    job_id: Annotated[str, Depends(existing)],
    services: ServicesDep,
    worker: Worker = None,
    level: AtLeast = None,
    last_event_id: EventId = 0,
    after: Annotated[int, Query(ge=0, lt=2**53, description="like Last-Event-ID, for the first connection")] = 0,
) -> EventStream:
    """A `line` event for each line of the log above `after`, with the line's id: stored lines first, then new lines.

    A few seconds after the job has ended, an `end` event gives its final status, and the stream closes.
    """
    return EventStream.of(_follow(services, job_id, Which(worker, level), max(last_event_id, after)))


async def _follow(services: Services, job_id: str, which: Which, last: int) -> AsyncIterator[bytes]:
    sent_at = time.monotonic()
    while not services.stopping():
        news = await run_in_threadpool(_look, services, job_id, which, last)
        if news.lines:
            sent_at = time.monotonic()
            yield b"".join(
                format_sse_event(data_str=line.model_dump_json(), event="line", id=str(line.id), retry=RECONNECT_MS)
                for line in news.lines
            )
        if news.ended:
            yield format_sse_event(data_str=json.dumps({"status": news.ended}), event="end")
            return
        last = news.last
        if len(news.lines) < AT_ONCE:
            if time.monotonic() - sent_at > PING_S:
                sent_at = time.monotonic()
                yield KEEPALIVE_COMMENT
            await asyncio.sleep(LOOK_S)


def _look(services: Services, job_id: str, which: Which, last: int) -> LogNews:
    try:
        return services.logs.news(job_id, which, last, AT_ONCE)
    except NotFound:
        return LogNews([], last, "deleted")
