"""The routes of a job's pages: the job, its submissions, its timeline."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from api import text_format
from api.deps import LogsDep, ServicesDep
from api.jobs.series import Columns, Lowest
from api.logs.view import log_view
from api.pages.explanations import GROUPS
from api.pages.page_response import PageRoute, ViewsDep, render
from api.pages.views import elapsed_s
from api.schemas import JobPublic
from api.stored_specs import plan_of, scored_part
from computeshare.jobspec.documents import export
from computeshare.types import Outcome

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute)

PARTS = {
    "notes": "parts/notes.html",
    "tags": "parts/tags.html",
    "privacy": "parts/privacy.html",
    "actions": "parts/actions.html",
    "menu-actions": "parts/menu.html",
    "state": "parts/state.html",
    "started": "parts/started.html",
    "outlook": "parts/outlook.html",
    "samples": "parts/samples.html",
    "workers": "parts/workers.html",
    "estimate": "parts/estimate.html",
    "submissions": "parts/submissions.html",
    "ledger": "parts/ledger.html",
    "timeline": "parts/timeline.html",
    "checkpoints": "parts/checkpoints.html",
}
"""The parts of a job's page that the browser fetches again after an event: element id to template."""
TABLE = {"values-table": "parts/values.html"}
CLASSES = {"classes": "parts/classes.html"}


@router.get("/jobs/{job_id}")
def show_job(
    request: Request, views: ViewsDep, service: LogsDep, job_id: str, log_worker: str = "", log_level: str = ""
) -> HTMLResponse:
    """A job's page."""
    with views.snapshot():
        view, series, lowest = views.job(job_id, table=True), views.plots(job_id), views.lowest_loss(job_id)
        logs, recipe = log_view(service, job_id, log_worker, log_level), views.recipe(view.job)
    return render(
        request,
        "job.html",
        view=view,
        recipe=recipe,
        late=view.takes_late,
        has_peers=view.has_peers,
        elapsed_s=elapsed_s(view.job, datetime.now(UTC)),
        logs=logs,
        shown=shown_as(view.job.spec, request),
        ended=view.ended,
        best_loss=lowest_of(lowest, view.job),
        best=best_of(view.job),
        data=page_data(view.job, series, lowest, paths_of(job_id)),
    )


@router.get("/jobs/{job_id}/data", response_class=JSONResponse)
def show_data(views: ViewsDep, job_id: str) -> dict[str, Any]:
    """The start data of a job page's script, as JSON, for a script that must start over. Raises NotFound."""
    with views.snapshot():
        return page_data(views.job_alone(job_id), views.plots(job_id), views.lowest_loss(job_id), paths_of(job_id))


@router.get("/jobs/{job_id}/parts")
def show_parts(
    request: Request, views: ViewsDep, job_id: str, table: bool = False, classes: bool = False
) -> HTMLResponse:
    """The changing parts of a job's page, as HTML; the page's script replaces the old parts with them."""
    with views.snapshot():
        view = views.job(job_id, table, classes)
    parts = PARTS | (TABLE if table else {}) | (CLASSES if classes else {})
    return render(request, "job_parts.html", view=view, parts=parts)


@router.get("/jobs/{job_id}/classes")
def show_classes(
    request: Request,
    services: ServicesDep,
    views: ViewsDep,
    job_id: str,
    version: Annotated[str, Query(pattern=r"^([0-9]{1,15}|latest|best)$")] = "best",
) -> HTMLResponse:
    """The page of a version's scores by class."""
    with views.snapshot():
        job, classes = services.jobs.show(job_id), services.history.classes(job_id, version)
    return render(request, "classes.html", job=job, classes=classes)


@router.get("/jobs/{job_id}/submissions")
def show_submissions(
    request: Request,
    views: ViewsDep,
    services: ServicesDep,
    job_id: str,
    outcome: str = "",
    worker: str = "",
    cursor: str = "",
) -> HTMLResponse:
    """The page of a job's submissions, each with its outcome and the reason."""
    known = next((one for one in get_args(Outcome) if one == outcome), None)
    with views.snapshot():
        job, workers = services.jobs.show(job_id), services.history.workers(job_id).items
        page = services.submissions.list(job_id, known, worker or None, cursor or None)
    chosen = {name: value for name, value in (("outcome", known), ("worker", worker)) if value}

    def link(**query: str) -> str:
        return f"/jobs/{job_id}/submissions?" + urlencode(chosen | query)

    return render(
        request,
        "submissions.html",
        job=job,
        page=page,
        names={one.id: one.name for one in workers if one.name},
        workers=workers,
        outcomes=get_args(Outcome),
        outcome=known,
        worker=worker,
        cursor=cursor,
        link=link,
    )


@router.get("/jobs/{job_id}/timeline")
def show_timeline(
    request: Request, views: ViewsDep, services: ServicesDep, job_id: str, cursor: str = "", events: str = ""
) -> HTMLResponse:
    """The page of a job's whole timeline, including every version, or of one group of its events."""
    group = next((one for one in GROUPS if one == events), None)
    with views.snapshot():
        job, workers = services.jobs.show(job_id), services.history.workers(job_id).items
        page = services.history.timeline_page(job_id, cursor or None, GROUPS[group] if group else None)
    names = {one.id: one.name for one in workers if one.name}

    def link(**query: str | None) -> str:
        given = {name: value for name, value in ({"events": group} | query).items() if value}
        return f"/jobs/{job_id}/timeline" + (f"?{urlencode(given)}" if given else "")

    about: dict[str, Any] = {"names": names, "cursor": cursor, "link": link, "group": group, "groups": list(GROUPS)}
    return render(request, "timeline.html", job=job, page=page, **about)


def lowest_of(lowest: Lowest | None, job: JobPublic) -> str:
    if lowest is None:
        return ""
    loss, version = text_format.loss(lowest.value), text_format.count(lowest.version)
    return f"lowest {scored_part(job.spec)} loss {loss} at version {version}"


def best_of(job: JobPublic) -> str:
    if job.best_version is None:
        return ""
    best = text_format.score(job.best_accuracy, job.best_loss, job.is_language_model)
    return f"best {best} at version {text_format.count(job.best_version)}"


def shown_as(spec: Mapping[str, Any], request: Request) -> dict[str, str]:
    """Requests that create a job with this specification, by form: JSON, curl, command line, Python."""
    return {
        "JSON": export.as_json(spec),
        "curl": export.as_curl(spec, str(request.base_url)),
        "Command line": export.as_cli(spec),
        "Python": export.as_python(spec),
    }


def paths_of(job_id: str) -> dict[str, str]:
    """Where the script of a job's page asks for what."""
    own, rest = f"/jobs/{job_id}", f"/v1/jobs/{job_id}"
    return {"job": rest, "events": f"{rest}/events", "data": f"{own}/data", "parts": f"{own}/parts"}


def page_data(
    job: JobPublic, series: dict[str, Columns], lowest: Lowest | None, paths: dict[str, str]
) -> dict[str, Any]:
    """The start data of the script of a job's page."""
    shown = job.model_dump(mode="json", exclude={"spec", "error"})
    return {
        "job": shown,
        "paths": paths,
        "round_samples": plan_of(job.spec).samples_per_round,
        "part": scored_part(job.spec),
        "series": series,
        "lowest": lowest._asdict() if lowest else None,
    }
