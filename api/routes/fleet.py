"""Workers and queues over REST."""

from fastapi import APIRouter

from api.deps import FleetDep
from api.schemas import QueueList, WorkerList

router = APIRouter(prefix="/v1", tags=["workers"])


@router.get("/workers")
def list_workers(service: FleetDep) -> WorkerList:
    """The workers that are online."""
    return service.workers()


@router.get("/queues")
def list_queues(service: FleetDep) -> QueueList:
    """The queues that have workers or jobs that have not ended."""
    return service.queues()
