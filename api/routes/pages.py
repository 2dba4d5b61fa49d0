"""The web pages. They are whole without JavaScript; with it, they stay up to date by themselves."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from fastapi.templating import Jinja2Templates
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from redis.exceptions import RedisError

from api.deps import FleetDep, ServicesDep
from api.errors import NotFound
from api.schemas import JobPublic, Metrics, Point
from api.services import wording
from api.services.paging import BadCursor
from api.services.views import STATUSES, JobView, Views
from computeshare.errors import BrokerError, SettingsError
from computeshare.types import ENDED

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

PARTS = {
    "actions": "parts/actions.html",
    "state": "parts/state.html",
    "started": "parts/started.html",
    "workers": "parts/workers.html",
    "ledger": "parts/ledger.html",
    "timeline": "parts/timeline.html",
    "checkpoints": "parts/checkpoints.html",
}
"""Element to template: what the browser fetches again when something has happened in a job."""
TABLE = {"values-table": "parts/values.html"}


def _views(services: ServicesDep) -> Views:
    return Views(services.database, services.jobs, services.history)


ViewsDep = Annotated[Views, Depends(_views)]


@router.get("/")
def show_jobs(request: Request, views: ViewsDep, status: str = "", cursor: str = "") -> HTMLResponse:
    """The jobs, running ones first."""
    known = next((one for one in STATUSES if one == status), None)
    if status and not known:
        return _missing(request, f"No job can be {status!r}", f"A job is {', '.join(STATUSES)}.")
    try:
        view = views.jobs(known, cursor or None)
    except BadCursor as error:
        return _missing(request, "There is no such page", str(error))

    def link(**query: str) -> str:
        return "/?" + urlencode({"status": status, **query} if status else query)

    return _render(request, "jobs.html", view=view, statuses=STATUSES, link=link)


@router.get("/jobs/{job_id}")
def show_job(request: Request, views: ViewsDep, job_id: str) -> HTMLResponse:
    """One job."""
    try:
        view, metrics = views.job(job_id, table=True), views.plots(job_id)
    except NotFound:
        return _missing(request, f"There is no job {job_id}", "It may have been deleted.")
    return _render(
        request,
        "job.html",
        view=view,
        ended=view.job.status in ENDED,
        best_loss=_best_loss(metrics.test_loss),
        best_accuracy=_best_accuracy(view.job),
        data=_page_data(view, metrics),
    )


@router.get("/jobs/{job_id}/parts")
def show_parts(request: Request, views: ViewsDep, job_id: str, table: bool = False) -> HTMLResponse:
    """Those parts of a job's page that change, for the page to replace its own."""
    try:
        view = views.job(job_id, table)
    except NotFound:
        return _missing(request, f"There is no job {job_id}", "It may have been deleted.")
    return _render(request, "job_parts.html", view=view, parts=PARTS | TABLE if table else PARTS)


@router.get("/workers")
def show_workers(request: Request, views: ViewsDep, fleet: FleetDep) -> HTMLResponse:
    """The machines that are online."""
    try:
        workers, problem = fleet.workers().items, None
    except (BrokerError, RedisError, SettingsError) as error:
        workers, problem = [], str(error)
    titles = {job_id: views.title(job_id) for job_id in {w.job_id for w in workers if w.job_id}}
    return _render(request, "workers.html", workers=workers, problem=problem, titles=titles)


def _best_loss(test_loss: list[Point]) -> str:
    if not test_loss:
        return ""
    best = min(test_loss, key=lambda point: point.value)
    return f"lowest test loss {wording.loss(best.value)} at version {wording.count(best.version)}"


def _best_accuracy(job: JobPublic) -> str:
    if job.best_accuracy is None or job.best_version is None:
        return ""
    return f"best {wording.percent(job.best_accuracy)} at version {wording.count(job.best_version)}"


def _page_data(view: JobView, metrics: Metrics) -> dict[str, Any]:
    """What the script needs to begin with."""
    names = ("train_loss", "test_loss", "test_accuracy")
    series = {name: [(point.version, point.value) for point in getattr(metrics, name)] for name in names}
    job = view.job.model_dump(mode="json", exclude={"spec", "error"})
    return {"job": job, "round_samples": view.round_samples, "series": series}


def _render(request: Request, template: str, status_code: int = 200, **context: Any) -> HTMLResponse:
    context |= {"now": datetime.now(UTC), "here": template.removesuffix(".html")}
    return _templates.TemplateResponse(request, template, context, status_code=status_code)


def _missing(request: Request, heading: str, text: str) -> HTMLResponse:
    return _render(request, "error.html", 404, heading=heading, text=text)


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent.parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for words in (
        wording.ago,
        wording.count,
        wording.done,
        wording.duration,
        wording.ledger_line,
        wording.loss,
        wording.moment,
        wording.percent,
        wording.rate,
        wording.share,
        wording.size,
        wording.told,
    ):
        environment.filters[words.__name__] = words
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


_templates = Jinja2Templates(env=_environment())
