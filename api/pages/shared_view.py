"""The view of a job behind a read-only link: an allow-list of fields and events. Pure.

Names of machines and their hosts, errors, reasons, notes and names of people are in none of it.
"""

import json
from collections.abc import Sequence
from typing import Any

from api.schemas import EventPublic, JobPublic

FIELDS = frozenset(
    {
        "title",
        "status",
        "version",
        "rounds_total",
        "epoch",
        "epochs_total",
        "loss",
        "metric",
        "accuracy",
        "test_loss",
        "perplexity",
        "tested",
        "tested_last",
        "scored_version",
        "best_version",
        "best_accuracy",
        "best_loss",
        "samples_per_s",
        "workers",
        "bytes_up",
        "bytes_down",
        "created_at",
        "started_at",
        "finished_at",
        "paused_at",
        "pause_after",
        "resume_at",
        "stopped_s",
        "left_s",
        "updated_at",
        "last_event_id",
    }
)
"""The fields of a job."""
EVENTS: dict[str, frozenset[str]] = {
    "created": frozenset(),
    "opened": frozenset({"restored", "version", "parameters"}),
    "version": frozenset({"version", "epoch", "loss", "samples", "samples_per_s", "staleness", "doubled", "consensus"}),
    "closed": frozenset({"version", "received", "total"}),
    "checkpoint": frozenset({"version", "bytes"}),
    "scored": frozenset({"version", "loss", "accuracy"}),
    "tested": frozenset({"version", "loss", "accuracy", "samples"}),
    "paused": frozenset(),
    "pausing": frozenset(),
    "resumed": frozenset(),
    "retried": frozenset(),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""The types of events, each with the fields of its data."""


def shared_job(job: JobPublic) -> dict[str, Any]:
    """A job's fields as JSON. `chosen` tells only whether codecs and precision were chosen: rounds may differ then."""
    return job.model_dump(mode="json", include=set(FIELDS)) | {"chosen": job.chosen is not None}


def shared_json(job: JobPublic) -> str:
    """The same as text."""
    return json.dumps(shared_job(job))


def shared_event(event: EventPublic) -> EventPublic | None:
    """An event without what a link does not show; None: a link does not show such events."""
    fields = EVENTS.get(event.type)
    if fields is None:
        return None
    return event.model_copy(update={"data": {name: value for name, value in event.data.items() if name in fields}})


def shared_events(events: Sequence[EventPublic]) -> list[EventPublic]:
    """The events that a link shows."""
    return [shown for event in events if (shown := shared_event(event))]
