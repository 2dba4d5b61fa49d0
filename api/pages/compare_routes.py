"""Routes that compare two to six jobs, over REST and as a page."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import AfterValidator

from api.deps import Services, ServicesDep
from api.errors import NotFound
from api.pages.compare_schemas import Comparison
from api.pages.comparison import compared
from api.pages.page_response import ViewsDep, capital, render
from api.pages.views import PLOT_POINTS, Views
from computeshare.jobspec.documents.differences import FEWEST, MOST
from computeshare.strategies.registry import stored
from computeshare.types import ENDED

router = APIRouter(tags=["jobs"])

Ids = Annotated[list[str] | None, Query(alias="job", max_length=50)]


def _each_once(ids: list[str]) -> list[str]:
    if len(set(ids)) < len(ids):
        raise ValueError("must name each job once")
    return ids


FewIds = Annotated[
    list[str],
    AfterValidator(_each_once),
    Query(alias="job", min_length=FEWEST, max_length=MOST, description="ids of the jobs, each given once"),
]


@router.get("/v1/compare")
def compare_jobs(services: ServicesDep, views: ViewsDep, ids: FewIds) -> Comparison:
    """Compare jobs: the results of each, and the fields in which their specifications differ."""
    with views.snapshot():
        return _compared(services, ids)


@router.get("/compare", include_in_schema=False, response_class=HTMLResponse)
def compare(request: Request, services: ServicesDep, views: ViewsDep, ids: Ids = None) -> HTMLResponse:
    """The comparison page: overlaid plots, results, and the differences of the specifications."""
    chosen = list(dict.fromkeys(ids or []))
    if not FEWEST <= len(chosen) <= MOST:
        text = f"{FEWEST} to {MOST} jobs can be compared; selected: {len(chosen)}."
        return _refused(request, "Select fewer jobs" if len(chosen) > MOST else "Select more jobs", text)
    try:
        with views.snapshot():
            found = _compared(services, chosen)
            data, tables = _data(views, chosen), [views.table(job_id) for job_id in chosen]
    except NotFound as error:
        return _refused(request, "These jobs cannot be compared", f"{capital(error.what)}.")
    return render(
        request,
        "compare.html",
        results=found.items,
        tables=tables,
        differences=found.differences,
        moving=any(job.status not in ENDED for job in found.items),
        late=any(one["late"] for one in data),
        data=data,
    )


@router.get("/compare/data", include_in_schema=False, response_class=JSONResponse)
def compare_data(views: ViewsDep, ids: Ids = None) -> list[dict[str, Any]]:
    """The data of the comparison page's plots, as JSON. Raises NotFound."""
    with views.snapshot():
        return _data(views, list(dict.fromkeys(ids or []))[:MOST])


def _compared(services: Services, ids: list[str]) -> Comparison:
    jobs = [services.jobs.show(job_id) for job_id in ids]
    lowest = [services.history.lowest_loss(job_id) for job_id in ids]
    return compared(jobs, lowest, datetime.now(UTC))


def _refused(request: Request, heading: str, text: str) -> HTMLResponse:
    """An error page with a link back to the list, which keeps the selection."""
    back = "Back to the list to change the selection"
    return render(request, "error.html", 404, heading=heading, text=text, back=back)


def _data(views: Views, ids: list[str]) -> list[dict[str, Any]]:
    found = []
    for job_id in ids:
        job = views.job_alone(job_id)
        about = {"id": job.id, "title": job.title, "start": (job.started_at or job.created_at).timestamp()}
        about["late"] = stored(job.spec).takes_any
        found.append(about | {"series": views.plots(job_id, PLOT_POINTS // len(ids))})
    return found
