"""A job's events as a stream: a snapshot first, then what happened and what happens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from api.deps import ServicesDep
from api.errors import NotFound
from api.routes.jobs import JobId
from api.services.looking import Looks, News

LOOK_S = 0.5
"""How often a stream looks for news: a snapshot is sent at most as often."""
RECONNECT_MS = 1000
EventId = Annotated[int, Header(alias="Last-Event-ID", ge=0, lt=2**53)]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def existing(job_id: JobId, services: ServicesDep) -> str:
    """The job's id, checked before the stream begins: afterwards it is too late for a 404."""
    services.jobs.show(job_id)
    return job_id


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def job_events(
    job_id: Annotated[str, Depends(existing)],
    services: ServicesDep,
    last_event_id: EventId = 0,
    after: Annotated[int, Query(ge=0, lt=2**53, description="as Last-Event-ID, for a first connection")] = 0,
) -> AsyncIterator[ServerSentEvent]:
    """`job` events are snapshots of the job; the others are its timeline, each with its id.

    The stream ends when the job has ended and everything was sent.
    """
    last, seen = max(last_event_id, after), -1
    while not services.stopping():
        try:
            revision, news = await run_in_threadpool(_look, services.looks, job_id, seen, last)
        except NotFound:
            return  # deleted
        if news is not None:
            yield ServerSentEvent(raw_data=news.job_json, event="job", retry=RECONNECT_MS)
            for event in news.events:
                yield ServerSentEvent(raw_data=event.json, event=event.type, id=str(event.id))
                last = event.id
            if news.more:
                continue
            if news.ended:
                return
        seen = revision
        await asyncio.sleep(LOOK_S)


def _look(looks: Looks, job_id: str, seen: int, last: int) -> tuple[int, News | None]:
    """The job's revision, and what is new if that is another than was `seen`. Raises NotFound."""
    revision = looks.revision(job_id)
    return revision, None if revision == seen else looks.news(job_id, revision, last)
