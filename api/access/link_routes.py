"""Read-only links to jobs over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.access.routes import SECRET
from api.access.schemas import LinkCreated, LinkList, LinkRequest
from api.deps import LinksDep
from api.jobs.routes import JobId

router = APIRouter(prefix="/v1/jobs", tags=["access"])

LinkId = Annotated[str, Path(max_length=64)]


@router.post("/{job_id}/links", status_code=201)
def create_link(
    job_id: JobId, body: LinkRequest, service: LinksDep, request: Request, response: Response
) -> LinkCreated:
    """Make a link that shows this job's page, and nothing else, to whoever has it. The link is not shown again."""
    made, code = service.create(job_id, body.days)
    response.headers.update(SECRET | {"Location": f"/v1/jobs/{job_id}/links"})
    return LinkCreated(**made.model_dump(), url=str(request.url_for("show_shared_job", code=code)))


@router.get("/{job_id}/links")
def list_links(job_id: JobId, service: LinksDep) -> LinkList:
    """The read-only links to this job, newest first."""
    return service.list(job_id)


@router.delete("/{job_id}/links/{link_id}", status_code=204, response_class=Response)
def revoke_link(job_id: JobId, link_id: LinkId, service: LinksDep) -> None:
    """Revoke a link: it shows nothing from now on, and open pages stop."""
    service.revoke(job_id, link_id)
