"""A job's events as a stream: a snapshot first, then what happened and what happens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from api.deps import Services, ServicesDep
from api.errors import NotFound
from api.routes.jobs import JobId
from api.schemas import EventPublic, JobPublic
from computeshare.types import ENDED

LOOK_S = 0.5
"""How often a stream looks for news: a snapshot is sent at most as often."""
AT_ONCE = 500
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
        revision, job, events = await run_in_threadpool(_look, services, job_id, seen, last)
        if revision is None:
            return  # deleted
        if job is not None:
            yield ServerSentEvent(raw_data=job.model_dump_json(), event="job", retry=RECONNECT_MS)
        for event in events:
            yield ServerSentEvent(raw_data=event.model_dump_json(), event=event.type, id=str(event.id))
            last = event.id
        if job is not None and job.status in ENDED and len(events) < AT_ONCE:
            return
        if len(events) < AT_ONCE:
            seen = revision
            await asyncio.sleep(LOOK_S)


def _look(
    services: Services, job_id: str, seen: int, last: int
) -> tuple[int | None, JobPublic | None, list[EventPublic]]:
    """The job's revision, and what is new if that is another than was `seen`."""
    try:
        revision = services.jobs.revision(job_id)
        if revision == seen:
            return revision, None, []
        return revision, services.jobs.show(job_id), services.history.events(job_id, last, AT_ONCE)
    except NotFound:
        return None, None, []
