"""The routes of the form for a new job: prefilled with defaults or from another job, checked while the user types."""

import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from redis.exceptions import RedisError

from api.datasets.service import Datasets
from api.deps import DatasetsDep, FleetDep, JobsDep, RecipesDep
from api.errors import Conflict, InvalidFields
from api.fleet.service import Fleet
from api.jobs.service import Jobs, fingerprint_of
from api.pages import job_form
from api.pages.job_routes import shown_as
from api.pages.page_response import PageRoute, ViewsDep, missing, render
from api.recipes.service import Recipes
from computeshare.errors import BrokerError, SettingsError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.tasks.recipes import packages

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute)

MOST_FIELDS = 200
DEFAULT_QUEUE: str = JobSpec.model_fields["queue"].default


async def _posted(request: Request) -> dict[str, str]:
    """The fields of a posted form; empty if the body is not a form."""
    text = (await request.body()).decode(errors="replace")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        return {}


@dataclass(frozen=True, slots=True)
class Parts:
    """The services that the form needs."""

    jobs: Jobs
    fleet: Fleet
    datasets: Datasets
    recipes: Recipes

    def with_own_data(self, filled: job_form.Filled) -> job_form.Filled:
        """The form with the facts of the user's own data set, or with an error that says why it cannot be used."""
        if filled.spec is None:
            return filled
        try:
            return replace(filled, spec=self.jobs.with_own_data(filled.spec))
        except InvalidFields as error:
            return _refused(filled, error)

    def suited(self, dataset: str) -> dict[str, str]:
        """A model that suits a user's data set, as form values; empty if there is no such data set."""
        facts = self.datasets.facts(dataset)
        if facts is None:
            return {}
        return {"model": {"images": "resnet20", "text": "gpt"}.get(facts.kind, "mlp")}


def _parts(jobs: JobsDep, fleet: FleetDep, datasets: DatasetsDep, recipes: RecipesDep) -> Parts:
    return Parts(jobs, fleet, datasets, recipes)


PartsDep = Annotated[Parts, Depends(_parts)]
Posted = Annotated[dict[str, str], Depends(_posted)]


@router.get("/jobs/new", response_class=RedirectResponse)
def lead_to_form(request: Request) -> RedirectResponse:
    """Redirect the address that a reader may guess to the form."""
    return RedirectResponse(request.url.replace(scheme="", netloc="", path="/new"), 308)


@router.get("/new")
def show_form(
    request: Request,
    views: ViewsDep,
    parts: PartsDep,
    origin: Annotated[str, Query(alias="from", max_length=64)] = "",
    dataset: Annotated[str, Query(max_length=100)] = "",
) -> HTMLResponse:
    """The form, filled in with another job's values or with defaults, and with a data set."""
    with views.snapshot():
        values = job_form.of_spec(views.job_alone(origin).spec) if origin else job_form.of_defaults()
        if dataset:
            values |= {"dataset": dataset} | parts.suited(dataset)
        return _form(request, job_form.filled(values), parts, origin)


@router.post("/new/check")
def check_form(request: Request, posted: Posted, parts: PartsDep) -> HTMLResponse:
    """The form with its errors and, if it is valid, the resulting job; the page's script calls this while the user
    types.
    """
    return _form(request, job_form.filled(posted), parts)


@router.post("/new")
def create_job(request: Request, posted: Posted, parts: PartsDep) -> Response:
    """Create the job and redirect to its page, or show the form with its errors. Sending the same form again creates no
    second job.
    """
    filled = job_form.filled(posted)
    if filled.spec is None:
        return _form(request, filled, parts, status_code=422)
    key = posted.get("key")
    try:
        job = parts.jobs.create(filled.spec, f"{key[:100]}-{fingerprint_of(filled.values)[:16]}" if key else None)
    except Conflict as error:
        return missing(request, "No job was created", str(error), 409)
    except InvalidFields as error:
        return _form(request, _refused(filled, error), parts, status_code=422)
    return RedirectResponse(f"/jobs/{job.id}", 303)


def _refused(filled: job_form.Filled, error: InvalidFields) -> job_form.Filled:
    return replace(filled, spec=None, errors=job_form.by_field(error.errors(), within="body"))


def _form(
    request: Request, filled: job_form.Filled, parts: Parts, origin: str = "", status_code: int = 200
) -> HTMLResponse:
    filled = parts.with_own_data(filled)
    serving = _serving(parts.fleet)
    queue = filled.values.get("queue", "").strip() or DEFAULT_QUEUE
    spec = filled.spec
    context: dict[str, Any] = {
        "groups": job_form.groups(),
        "recipes": {
            **{one.digest: f"{one.name or 'recipe'} ({one.digest[7:15]})" for one in parts.recipes.list().items},
            **{PACKAGE + name: f"{name}, of the package {one.release}" for name, one in packages.installed().items()},
        },
        "others": job_form.OTHERS,
        "filled": filled,
        "wrong": job_form.wrong(filled),
        "queues": serving or {},
        "unserved": serving is not None and not serving.get(queue) and "queue" not in filled.errors,
        "own": parts.datasets.names(),
        "warnings": parts.jobs.warnings(spec) if spec else [],
        "origin": origin,
        "key": filled.values.get("key") or secrets.token_urlsafe(16),
        "shown": shown_as(spec.model_dump(mode="json"), request) if spec else {},
        "samples": spec.micro_batch * spec.micro_batches_per_round if spec else 0,
    }
    return render(request, "new.html", status_code, **context)


def _serving(fleet: Fleet) -> dict[str, int] | None:
    """The number of workers of each queue; None while the broker is not available."""
    try:
        return {queue.name: queue.workers for queue in fleet.queues().items}
    except (BrokerError, RedisError, SettingsError):
        return None
