"""Two to six jobs side by side, as a page."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from api.deps import ServicesDep
from api.errors import NotFound
from api.routes.rendering import ViewsDep, render
from api.services.comparing import differing, result
from api.services.views import PLOT_POINTS, Views
from computeshare.comparing import FEWEST, MOST
from computeshare.types import ENDED

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

Ids = Annotated[list[str] | None, Query(alias="job", max_length=50)]


@router.get("/compare")
def compare(request: Request, services: ServicesDep, views: ViewsDep, ids: Ids = None) -> HTMLResponse:
    """Series overlaid, differences of the specifications, best and last."""
    chosen = list(dict.fromkeys(ids or []))
    if not FEWEST <= len(chosen) <= MOST:
        text = f"{FEWEST} to {MOST} jobs can stand side by side; ticked: {len(chosen)}."
        return _refused(request, "Tick fewer jobs" if len(chosen) > MOST else "Tick more jobs", text)
    now = datetime.now(UTC)
    try:
        jobs = [services.jobs.show(job_id) for job_id in chosen]
        results = [result(job, services.history.lowest_loss(job.id), now) for job in jobs]
        data, tables = _data(views, chosen), [views.table(job.id) for job in jobs]
    except NotFound as error:
        return _refused(request, "These jobs cannot be compared", str(error))
    return render(
        request,
        "compare.html",
        results=results,
        tables=tables,
        differences=differing([job.spec for job in jobs]),
        moving=any(job.status not in ENDED for job in jobs),
        late=any(job.spec["strategy"]["kind"] == "async" for job in jobs),
        data=data,
    )


@router.get("/compare/data", response_class=JSONResponse)
def compare_data(views: ViewsDep, ids: Ids = None) -> list[dict[str, Any]]:
    """What the script of the page draws. Raises NotFound."""
    return _data(views, list(dict.fromkeys(ids or []))[:MOST])


def _refused(request: Request, heading: str, text: str) -> HTMLResponse:
    """A page that leads back to the list, which keeps what was ticked."""
    back = "Back to the list, to change what is ticked"
    return render(request, "error.html", 404, heading=heading, text=text, back=back)


def _data(views: Views, ids: list[str]) -> list[dict[str, Any]]:
    found = []
    for job_id in ids:
        job = views.job_alone(job_id)
        about = {"id": job.id, "title": job.title, "start": (job.started_at or job.created_at).timestamp()}
        found.append(about | {"series": views.plots(job_id, PLOT_POINTS // len(ids))})
    return found
