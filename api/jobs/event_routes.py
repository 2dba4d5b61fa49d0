"""The route of a job's event stream (server-sent events): a snapshot, then past and new events."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse

from api.deps import ServicesDep
from api.jobs.routes import JobId

EventId = Annotated[int, Header(alias="Last-Event-ID", ge=0, lt=2**53)]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class EventStream(StreamingResponse):
    """A response of encoded events. (FastAPI's own class raises an error when a client disconnects without closing.)"""

    media_type = "text/event-stream"

    @classmethod
    def of(cls, encoded: AsyncIterator[bytes]) -> "EventStream":
        """A stream that caches do not store and proxies do not buffer."""
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
"""The schema of a stream's events, for the OpenAPI document."""


def existing(job_id: JobId, services: ServicesDep) -> str:
    """The job's id, checked before the stream begins, when a 404 can still be sent. Raises NotFound."""
    services.jobs.show(job_id)
    return job_id


@router.get("/{job_id}/events", response_class=EventStream, responses=AS_EVENTS)
async def job_events(
    job_id: Annotated[str, Depends(existing)],
    services: ServicesDep,
    last_event_id: EventId = 0,
    after: Annotated[int, Query(ge=0, lt=2**53, description="like Last-Event-ID, for the first connection")] = 0,
) -> EventStream:
    """Stream the job: `job` events are snapshots; all other events are the job's timeline, each with its id.

    The stream ends when the job has ended and everything was sent, or with an event `deleted`.
    """
    return EventStream.of(services.feeds.stream(job_id, max(last_event_id, after)))
