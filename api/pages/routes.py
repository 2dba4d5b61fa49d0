"""The routes of the list of jobs and of the workers' page. Pages work without JavaScript; with it, they update
themselves.
"""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from redis.exceptions import RedisError

from api.deps import ContributionsDep, FleetDep
from api.jobs.job_list import Chosen
from api.pages.page_response import PageRoute, ViewsDep, missing, render
from api.pages.views import STATUSES
from computeshare.errors import BrokerError, SettingsError
from computeshare.types import JobSort

SORTS: dict[JobSort, str] = {
    "newest": "Newest first",
    "oldest": "Oldest first",
    "name": "Name",
    "accuracy": "Best accuracy",
    "updated": "Last update",
}
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute)


@router.get("/")
def show_jobs(
    request: Request,
    views: ViewsDep,
    status: str = "",
    queue: str = "",
    search: Annotated[str, Query(max_length=100)] = "",
    tag: Annotated[str, Query(max_length=30)] = "",
    sort: str = "",
    cursor: str = "",
) -> HTMLResponse:
    """The list of jobs: running jobs first, or in the order of `sort`."""
    known = next((one for one in STATUSES if one == status), None)
    if status and not known:
        return missing(request, f"There is no status {status!r}", f"Choose from {', '.join(STATUSES)}.")
    order = next((one for one in SORTS if one == sort), None)
    with views.snapshot():
        view = views.jobs(Chosen([known] if known else (), queue or None, search, tag), order, cursor or None)
    asked = {"status": known or "", "queue": queue, "search": search, "tag": tag, "sort": order or ""}

    def link(**query: str) -> str:
        return "/?" + urlencode({name: value for name, value in (asked | query).items() if value})

    return render(request, "jobs.html", view=view, asked=asked, statuses=STATUSES, sorts=SORTS, link=link)


@router.get("/workers")
def show_workers(request: Request, views: ViewsDep, fleet: FleetDep, contributions: ContributionsDep) -> HTMLResponse:
    """The machines, online or not, the queues that they serve, and what each has contributed."""
    with views.snapshot():
        try:
            workers, queues, problem = fleet.workers(offline=True).items, fleet.queues().items, None
        except (BrokerError, RedisError, SettingsError) as error:
            workers, queues, problem = [], [], str(error)
        titles = {job_id: views.title(job_id) for job_id in {w.job_id for w in workers if w.job_id}}
        helped = contributions.list()
    found: dict[str, Any] = {"workers": workers, "queues": queues, "titles": titles, "helped": helped}
    return render(request, "workers.html", problem=problem, **found)
