"""What a user decides about a worker in a job, over REST."""

from typing import Annotated

from fastapi import APIRouter, Path

from api.deps import BansDep, HistoryDep
from api.routes.jobs import JobId
from api.schemas import JobWorkerPublic

router = APIRouter(prefix="/v1/jobs", tags=["workers"])

WorkerId = Annotated[str, Path(max_length=100, description="the worker's id, as in the job's workers")]


@router.post("/{job_id}/workers/{worker}/unban", status_code=202)
def unban_worker(job_id: JobId, worker: WorkerId, bans: BansDep, history: HistoryDep) -> JobWorkerPublic:
    """Let a banned worker take part in the job again."""
    bans.lift(job_id, worker)
    return history.worker(job_id, worker)
