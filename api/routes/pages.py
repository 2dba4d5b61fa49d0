"""The web pages. They are whole without JavaScript; with it, they stay up to date by themselves."""

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from redis.exceptions import RedisError

from api.deps import FleetDep
from api.routes.rendering import ViewsDep, missing, render
from api.services.paging import BadCursor
from api.services.views import STATUSES
from computeshare.errors import BrokerError, SettingsError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def show_jobs(request: Request, views: ViewsDep, status: str = "", queue: str = "", cursor: str = "") -> HTMLResponse:
    """The jobs, running ones first."""
    known = next((one for one in STATUSES if one == status), None)
    if status and not known:
        return missing(request, f"No job can be {status!r}", f"A job is {', '.join(STATUSES)}.")
    try:
        view = views.jobs(known, queue or None, cursor or None)
    except BadCursor as error:
        return missing(request, "There is no such page", str(error))

    def link(**query: str) -> str:
        chosen = {"status": status, "queue": queue} | query
        return "/?" + urlencode({name: value for name, value in chosen.items() if value})

    return render(request, "jobs.html", view=view, statuses=STATUSES, link=link)


@router.get("/workers")
def show_workers(request: Request, views: ViewsDep, fleet: FleetDep) -> HTMLResponse:
    """The machines, online or not, and the queues that they serve."""
    try:
        workers, queues, problem = fleet.workers(offline=True).items, fleet.queues().items, None
    except (BrokerError, RedisError, SettingsError) as error:
        workers, queues, problem = [], [], str(error)
    titles = {job_id: views.title(job_id) for job_id in {w.job_id for w in workers if w.job_id}}
    return render(request, "workers.html", workers=workers, queues=queues, problem=problem, titles=titles)
