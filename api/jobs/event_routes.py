"""A job's events as a stream: a snapshot first, then what happened and what happens."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse

from api.deps import ServicesDep
from api.jobs.routes import JobId

EventId = Annotated[int, Header(alias="Last-Event-ID", ge=0, lt=2**53)]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class EventStream(StreamingResponse):
    """Events that are encoded already. (FastAPI's own class fails where a client goes without a word.)"""

    media_type = "text/event-stream"

    @classmethod
    def of(cls, encoded: AsyncIterator[bytes]) -> "EventStream":
        """A stream that no cache keeps and no proxy holds back."""
        return cls(encoded, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})


AS_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            EventStream.media_type: {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {
                        "data": {"type": "string"},
                        "event": {"type": "string"},
                        "id": {"type": "string"},
                        "retry": {"type": "integer", "minimum": 0},
                    },
                }
            }
        }
    }
}
"""What a stream answers, an event at a time; for the list of routes."""


def existing(job_id: JobId, services: ServicesDep) -> str:
    """The job's id, checked before the stream begins: afterwards it is too late for a 404."""
    services.jobs.show(job_id)
    return job_id


@router.get("/{job_id}/events", response_class=EventStream, responses=AS_EVENTS)
async def job_events(
    job_id: Annotated[str, Depends(existing)],
    services: ServicesDep,
    last_event_id: EventId = 0,
    after: Annotated[int, Query(ge=0, lt=2**53, description="as Last-Event-ID, for a first connection")] = 0,
) -> EventStream:
    """`job` events are snapshots of the job; the others are its timeline, each with its id.

    The stream ends when the job has ended and everything was sent.
    """
    return EventStream.of(services.feeds.stream(job_id, max(last_event_id, after)))
