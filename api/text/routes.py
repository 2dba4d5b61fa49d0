"""Text from a job's language model over REST."""

from fastapi import APIRouter

from api.deps import TextsDep
from api.jobs.routes import JobId
from api.schemas import GenerateRequest, TextPublic

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("/{job_id}/generate")
def generate_text(job_id: JobId, request: GenerateRequest, service: TextsDep) -> TextPublic:
    """Continue a prompt with a job's language model; an evaluator generates the text, for a few seconds at most."""
    return service.generate(job_id, request)
