"""Workers and queues over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.deps import ContributionsDep, FleetDep
from api.schemas import ContributionList, QueueList, WorkerChange, WorkerList, WorkerPublic

router = APIRouter(prefix="/v1", tags=["workers"])

WorkerId = Annotated[str, Path(max_length=100, description="the worker's id, as in a list of workers")]


@router.get("/workers")
def list_workers(
    service: FleetDep, offline: Annotated[bool, Query(description="also list workers seen in the last 30 days")] = False
) -> WorkerList:
    """The workers that are online; with `offline`, also the workers seen in the last 30 days."""
    return service.workers(offline)


@router.get("/workers/contributions")
def list_contributions(service: ContributionsDep) -> ContributionList:
    """The contributions of each machine and person to all jobs, most samples first; a minute old at most."""
    return service.list()


@router.patch("/workers/{worker}")
def change_worker(
    worker: WorkerId, body: WorkerChange, service: FleetDep, contributions: ContributionsDep
) -> WorkerPublic:
    """Say whose a worker's machine is. What it has contributed so far counts as theirs, too."""
    try:
        return service.assign(worker, body.person)
    finally:  # it may be stored although the answer could not be made
        contributions.forget()


@router.post("/workers/{worker}/drain", status_code=202)
def drain_worker(worker: WorkerId, service: FleetDep) -> WorkerPublic:
    """Give a worker no more work, even after a restart; the worker finishes its current work unit."""
    return service.drain(worker, drained=True)


@router.post("/workers/{worker}/undrain", status_code=202)
def undrain_worker(worker: WorkerId, service: FleetDep) -> WorkerPublic:
    """Give a drained worker work again."""
    return service.drain(worker, drained=False)


@router.delete("/workers/{worker}", status_code=204, response_class=Response)
def remove_worker(worker: WorkerId, service: FleetDep) -> None:
    """Ask an online worker to finish its work unit and end; forget an offline worker."""
    service.remove(worker)


@router.get("/queues")
def list_queues(service: FleetDep) -> QueueList:
    """The queues that have workers or jobs that have not ended."""
    return service.queues()
