"""REST routes for a user's decisions about a worker in a job."""

from fastapi import APIRouter

from api.deps import BansDep, HistoryDep
from api.fleet.routes import WorkerId
from api.jobs.routes import JobId
from api.schemas import JobWorkerPublic

router = APIRouter(prefix="/v1/jobs", tags=["workers"])


@router.post("/{job_id}/workers/{worker}/unban", status_code=202)
def unban_worker(job_id: JobId, worker: WorkerId, bans: BansDep, history: HistoryDep) -> JobWorkerPublic:
    """Let a banned worker take part in the job again."""
    bans.lift(job_id, worker)
    return history.worker(job_id, worker)
