"""Jobs over REST."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import AfterValidator
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from api.deps import Cursor, ForksDep, HistoryDep, JobsDep, Limit, SubmissionsDep
from api.http.security import JOB_BYTES
from api.jobs.job_list import Chosen
from api.schemas import (
    CheckpointList,
    ClassesPublic,
    EstimatePublic,
    ForkRequest,
    JobChange,
    JobPage,
    JobPublic,
    JobWorkerList,
    LedgerPublic,
    Metrics,
    SamplePage,
    SubmissionPage,
    VersionPage,
)
from computeshare.jobspec.spec import JobSpec
from computeshare.types import JobSort, JobStatus, Outcome

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class WeightsFile(FileResponse):
    """A file, or the requested range of it. (FileResponse itself answers an impossible range as plain text.)"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_file(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                about = {"content-range": Headers(raw=message["headers"]).get("content-range", "bytes */*")}
                text = "the range is malformed, or lies beyond the end of the file: leave the header Range out"
                raise HTTPException(message["status"], text, about)
            await send(message)

        await super().__call__(scope, receive, send_file)


JobId = Annotated[str, Path(max_length=64)]
MOST_HOURS = 24 * 365
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="any text; requests with the same key create only one job",
    ),
]


def _which(value: str) -> str:
    if value not in ("latest", "best") and not re.fullmatch(r"[0-9]{1,15}", value):
        raise ValueError("must be a version number, latest or best")
    return value


Which = Annotated[str, Path(max_length=64), AfterValidator(_which)]


@router.post("", status_code=201, max_body_size=JOB_BYTES)
def create_job(spec: JobSpec, service: JobsDep, response: Response, key: IdempotencyKey = None) -> JobPublic:
    """Create a job; the scheduler gives it workers as they become free."""
    job = service.create(spec, key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job.model_copy(update={"warnings": service.warnings(JobSpec.model_validate(job.spec))})


@router.get("")
def list_jobs(
    service: JobsDep,
    status: Annotated[list[JobStatus | Literal[""]] | None, Query(description="may be repeated")] = None,
    queue: Annotated[str | None, Query(max_length=64)] = None,
    search: Annotated[str, Query(max_length=100, description="part of the title, in any case; or an id")] = "",
    tag: Annotated[str, Query(max_length=30, description="one of the job's tags")] = "",
    sort: Annotated[JobSort, Query(description="accuracy: best first; updated: latest first")] = "newest",
    cursor: Cursor = None,
    limit: Limit = 50,
) -> JobPage:
    """Jobs, newest first unless `sort` gives another order; a cursor is valid for its own order only."""
    chosen = Chosen([one for one in status or () if one], queue, search, tag)
    return service.list(chosen, cursor, limit, sort)


@router.get("/{job_id}")
def show_job(job_id: JobId, service: JobsDep) -> JobPublic:
    """A job by its id."""
    return service.show(job_id)


@router.patch("/{job_id}")
def change_job(job_id: JobId, change: JobChange, service: JobsDep) -> JobPublic:
    """Change a job's name, notes or tags, or, until it ends, its other editable fields, such as its priority. A new
    priority moves workers between jobs within seconds.
    """
    return service.update(job_id, **change.changes)


@router.post("/{job_id}/pause", status_code=202)
def pause_job(
    job_id: JobId,
    service: JobsDep,
    after: Annotated[Literal["now", "round"], Query(description="`round`: finish the current round first")] = "now",
    hours: Annotated[
        float | None, Query(gt=0, le=MOST_HOURS, description="resume automatically after this many hours")
    ] = None,
) -> JobPublic:
    """Pause a queued or running job: its workers leave, its progress is kept."""
    return service.pause(job_id, after == "round", hours)


@router.post("/{job_id}/resume", status_code=202)
def resume_job(job_id: JobId, service: JobsDep) -> JobPublic:
    """Resume a paused job where it stopped, or cancel a pause planned for the end of the round."""
    return service.resume(job_id)


@router.post("/{job_id}/retry", status_code=202)
def retry_job(job_id: JobId, service: JobsDep) -> JobPublic:
    """Continue a failed job from its last checkpoint."""
    return service.retry(job_id)


@router.post("/{job_id}/fork", status_code=201, max_body_size=JOB_BYTES)
def fork_job(
    job_id: JobId, request: ForkRequest, service: ForksDep, response: Response, key: IdempotencyKey = None
) -> JobPublic:
    """Create a job that starts from a version of this job; fields that `spec` leaves out are copied from this job."""
    job = service.fork(job_id, request, key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.post("/{job_id}/cancel", status_code=202)
def cancel_job(job_id: JobId, service: JobsDep) -> JobPublic:
    """Stop a job for good; its workers leave within a round."""
    return service.cancel(job_id)


@router.delete("/{job_id}", status_code=204, response_class=Response)
def delete_job(job_id: JobId, service: JobsDep) -> None:
    """Delete a job that has ended, with its history and its checkpoints."""
    service.delete(job_id)


@router.get("/{job_id}/metrics")
def job_metrics(
    job_id: JobId,
    service: HistoryDep,
    since: Annotated[int, Query(ge=0, lt=2**53, description="only versions after this one")] = 0,
    points: Annotated[
        int, Query(ge=2, le=10_000, description="approximate number of points per series; longer series are thinned")
    ] = 1000,
    until: Annotated[int | None, Query(ge=1, lt=2**53, description="only versions up to this one")] = None,
) -> Metrics:
    """The job's series by version: losses, accuracy, speed, bytes, staleness."""
    return service.metrics(job_id, since, points, until)


@router.get("/{job_id}/metrics.csv", response_class=StreamingResponse)
def job_metrics_csv(job_id: JobId, service: HistoryDep) -> Response:
    """The series of every version, as a CSV file, with a column for each of a recipe's own metrics."""
    headers = {"Content-Disposition": f'attachment; filename="{job_id}.csv"'}
    return StreamingResponse(service.csv(job_id), headers=headers, media_type="text/csv")


@router.get("/{job_id}/submissions")
def job_submissions(
    job_id: JobId,
    service: SubmissionsDep,
    outcome: Outcome | None = None,
    worker: Annotated[str | None, Query(max_length=100, description="the worker's id or name")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> SubmissionPage:
    """The job's submissions with their outcomes, newest first."""
    return service.list(job_id, outcome, worker, cursor, limit)


@router.get("/{job_id}/estimate")
def job_estimate(job_id: JobId, service: SubmissionsDep) -> EstimatePublic:
    """The estimated speed of the job with one more worker, as a multiple of its present speed."""
    return service.estimate(job_id)


@router.get("/{job_id}/ledger")
def job_ledger(job_id: JobId, service: HistoryDep) -> LedgerPublic:
    """How often each epoch's samples were counted."""
    return service.ledger(job_id)


@router.get("/{job_id}/versions")
def job_versions(
    job_id: JobId,
    service: HistoryDep,
    since: Annotated[int, Query(ge=0, lt=2**53, description="only versions after this one")] = 0,
    limit: Limit = 100,
) -> VersionPage:
    """The job's versions, ascending, each with its digest and its work units; without versions undone by a restore."""
    return service.versions(job_id, since, limit)


@router.get("/{job_id}/workers")
def job_workers(job_id: JobId, service: HistoryDep) -> JobWorkerList:
    """The workers that take or took part in the job, active workers first."""
    return service.workers(job_id)


@router.get("/{job_id}/samples")
def job_samples(job_id: JobId, service: HistoryDep, cursor: Cursor = None, limit: Limit = 50) -> SamplePage:
    """Short texts by the scored versions of a language model, newest version first; empty for other models."""
    return service.samples(job_id, cursor, limit)


@router.get("/{job_id}/checkpoints")
def job_checkpoints(job_id: JobId, service: HistoryDep) -> CheckpointList:
    """Versions whose weights can be downloaded, newest first."""
    return service.checkpoints(job_id)


@router.head("/{job_id}/checkpoints/{which}", include_in_schema=False)
@router.get("/{job_id}/checkpoints/{which}", response_class=FileResponse)
def download_checkpoint(
    job_id: JobId,
    which: Which,
    service: HistoryDep,
    request: Request,
    weights: Annotated[
        Literal["average", "raw", "before"],
        Query(
            description="average: the moving average, if the job keeps one; raw: the version itself; before: the "
            "version before it, in a job with a delay or an overlap"
        ),
    ] = "average",
) -> Response:
    """Download a version's weights as safetensors; `which` is its number, `latest` or `best`. Range requests work."""
    path, sha256, version = service.weights(job_id, which, weights)
    headers = {"ETag": f'"{sha256}"', "Cache-Control": "private, no-cache"}
    known = request.headers.get("if-none-match", "")
    if headers["ETag"] in known or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    name = f"{job_id}-v{version}.safetensors"
    return WeightsFile(path, headers=headers, media_type="application/octet-stream", filename=name)


@router.get("/{job_id}/checkpoints/{which}/classes")
def checkpoint_classes(job_id: JobId, which: Which, service: HistoryDep) -> ClassesPublic:
    """A classifier's precision, recall, F1 and support by class at a version, and its confusion matrix."""
    return service.classes(job_id, which)


@router.get("/{job_id}/checkpoints/{which}/state", response_class=FileResponse)
def download_state(job_id: JobId, which: Which, service: HistoryDep) -> Response:
    """Download the reducer's state of a version, such as the optimizer's, which a replay needs beside the weights."""
    return FileResponse(
        service.state(job_id, which), media_type="application/octet-stream", filename="state.safetensors"
    )
