"""The worker's wheel over HTTP, for machines without a checkout. Everyone may have this code: no token is needed."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.errors import NotFound
from api.fleet.worker_wheel import FILE, wheel
from api.schemas import WorkerRelease
from computeshare.protocol.handshake import OURS

router = APIRouter(prefix="/v1/worker", tags=["workers"])


@router.get("/release")
def show_worker_release() -> WorkerRelease:
    """The release of the worker that fits this control plane, and the wheel that installs it."""
    built = wheel()
    return WorkerRelease(
        version=OURS.version, protocol=OURS.protocol, file=FILE, sha256=built.sha256, size=len(built.content)
    )


@router.get("/{file}", response_class=Response)
@router.head("/{file}", include_in_schema=False)
def download_worker_wheel(file: Annotated[str, Path(max_length=200)]) -> Response:
    """The wheel `computeshare-worker`, as `pip`, `pipx` and `uv` install it."""
    if file != FILE:
        raise NotFound(f"there is no {file} here: this control plane has {FILE}")
    built = wheel()
    return Response(built.content, media_type="application/zip", headers={"etag": f'"{built.sha256}"'})
