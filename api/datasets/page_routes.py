"""The page of users' data sets. Without JavaScript it is for reading; with JavaScript it removes data sets."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from api.deps import DatasetsDep, SamplesDep
from api.pages.page_response import render

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/datasets")
def show_datasets(request: Request, service: DatasetsDep, samples: SamplesDep) -> HTMLResponse:
    """The data sets, each with some of its samples."""
    found = [(dataset, samples.shown(dataset)) for dataset in service.list().items]
    return render(request, "datasets.html", datasets=found)
