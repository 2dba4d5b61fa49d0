"""The pages of users' data sets. Without JavaScript they are for reading; with JavaScript they remove data sets."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from api.datasets.routes import Name
from api.deps import DatasetsDep, SamplesDep
from api.pages.page_response import PageRoute, ViewsDep, render

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute)


@router.get("/datasets")
def show_datasets(request: Request, service: DatasetsDep, samples: SamplesDep) -> HTMLResponse:
    """The data sets, each with some of its samples."""
    found = [(dataset, samples.shown(dataset)) for dataset in service.list().items]
    return render(request, "datasets.html", datasets=found)


@router.get("/datasets/{name}")
def show_dataset(
    request: Request, name: Name, views: ViewsDep, service: DatasetsDep, samples: SamplesDep
) -> HTMLResponse:
    """One data set: its splits, some of its samples, and the jobs that use it."""
    with views.snapshot():
        dataset, jobs = service.show(name), service.jobs(name)
    return render(request, "dataset.html", dataset=dataset, samples=samples.shown(dataset), jobs=jobs)
