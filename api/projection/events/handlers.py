"""The function that turns each type of event into rows.

Events come from workers too, so nothing in them is trusted: malformed events are skipped, and every text is bounded.
"""

from collections.abc import Callable

from api.projection.events import job, stages, submissions, versions, workers
from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import StreamEvent

HANDLERS: dict[str, Callable[[JobProjection, StreamEvent], None]] = {
    "chosen": job.chosen,
    "reducer": job.reducer,
    "mended": job.mended,
    "failed": job.failed,
    "held": job.held,
    "split": stages.split,
    "placed": stages.placed,
    "joined": workers.joined,
    "left": workers.left,
    "banned": workers.banned,
    "unfit": workers.unfit,
    "forgiven": workers.forgiven,
    "audited": workers.audited,
    "suspected": workers.suspected,
    "submission": submissions.submission,
    "folded": submissions.folded,
    "reassigned": submissions.reassigned,
    "closed": submissions.closed,
    "refused": submissions.refused,
    "version": versions.version,
    "opened": versions.opened,
    "checkpoint": versions.checkpoint,
    "scored": versions.scored,
    "stopped": versions.stopped,
    "damaged": versions.damaged,
    "unscored": versions.unscored,
    "doubted": versions.doubted,
    "republished": versions.republished,
}


def apply(projection: JobProjection, event: StreamEvent) -> None:
    """Apply one event; unknown types are ignored. Raises KeyError, TypeError or ValueError where it is malformed."""
    if handler := HANDLERS.get(event.type):
        handler(projection, event)
