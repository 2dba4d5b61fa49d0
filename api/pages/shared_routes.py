"""The routes behind a read-only link: one job's page, its changing parts, its data and its events.

The middleware has checked the link's code; the job that it shows is in `request.state.caller`.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from api.access.caller import Caller
from api.deps import ServicesDep
from api.jobs.event_routes import EventId, EventStream
from api.pages.job_routes import best_of, lowest_of, page_data
from api.pages.page_response import PageRoute, ViewsDep, render
from api.pages.shared_view import shared_job
from api.pages.views import JobView, elapsed_s

router = APIRouter(
    prefix="/shared/{code}", include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute
)

PARTS = {
    "state": "parts/shared_state.html",
    "started": "parts/started.html",
    "samples": "parts/samples.html",
    "ledger": "parts/ledger.html",
    "timeline": "parts/shared_timeline.html",
}
TABLE = {"values-table": "parts/values.html"}


def _job_id(request: Request) -> str:
    caller: Caller = request.state.caller
    assert caller.job_id is not None  # nobody else gets here
    return caller.job_id


JobId = Annotated[str, Depends(_job_id)]


@router.get("")
def show_shared_job(request: Request, views: ViewsDep, code: str, job_id: JobId) -> HTMLResponse:
    """A job's page as a link shows it."""
    with views.snapshot():
        view = views.job(job_id, table=True)
        data = _data(views, job_id, view, code)
        lowest = views.lowest_loss(job_id)
    return render(
        request,
        "shared.html",
        view=view,
        late=view.takes_late,
        has_peers=view.has_peers,
        elapsed_s=elapsed_s(view.job, datetime.now(UTC)),
        best_loss=lowest_of(lowest, view.job),
        best=best_of(view.job),
        data=data,
    )


@router.get("/parts")
def show_shared_parts(request: Request, views: ViewsDep, job_id: JobId, table: bool = False) -> HTMLResponse:
    """The changing parts of that page, as HTML."""
    with views.snapshot():
        view = views.job(job_id, table)
    return render(request, "job_parts.html", view=view, parts=PARTS | (TABLE if table else {}))


@router.get("/data", response_class=JSONResponse)
def show_shared_data(views: ViewsDep, code: str, job_id: JobId) -> dict[str, Any]:
    """The start data of that page's script, as JSON."""
    with views.snapshot():
        return _data(views, job_id, views.job(job_id, table=False), code)


@router.get("/events", response_class=EventStream)
async def follow_shared_job(
    services: ServicesDep,
    job_id: JobId,
    last_event_id: EventId = 0,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
) -> EventStream:
    """Stream the job as a link shows it."""
    return EventStream.of(services.shared_feeds.stream(job_id, max(last_event_id, after)))


def _data(views: ViewsDep, job_id: str, view: JobView, code: str) -> dict[str, Any]:
    own = f"/shared/{code}"
    paths = {"events": f"{own}/events", "data": f"{own}/data", "parts": f"{own}/parts"}
    shown = page_data(view.job, views.plots(job_id), views.lowest_loss(job_id), paths)
    return shown | {"job": shared_job(view.job)}
