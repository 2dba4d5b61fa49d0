"""Bundles over REST: a manifest, then the pieces that the control plane lacks."""

from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from api.bundles.schemas import BundleDetail, BundlePublic
from api.deps import AuditDep, BundlesDep
from computeshare.bundles.manifest import CONTENT_BYTES, PIECE_BYTES, Manifest

router = APIRouter(prefix="/v1/bundles", tags=["bundles"])

Digest = Annotated[str, Path(max_length=100, description="the bundle's digest, `sha256:` and 64 hex digits")]
Piece = Annotated[str, Path(max_length=100, description="sha256 of the piece, 64 hex digits")]
OCTETS = "application/octet-stream"


@router.post("", status_code=201, max_body_size=CONTENT_BYTES, responses={200: {"model": BundlePublic}})
def create_bundle(manifest: Manifest, store: BundlesDep, audit: AuditDep, response: Response) -> BundlePublic:
    """Announce a bundle by its manifest; the answer names the pieces to send. 200: it was announced before. A bundle
    that neither a job nor a data set names is removed after a day. What is damaged here is among the pieces to send.
    """
    if not store.adopt(manifest):
        response.status_code = 200
        store.read_back(manifest.digest, always=True)
    else:
        audit.add("bundle.create", manifest.digest, bytes=manifest.bytes)
    response.headers["Location"] = f"/v1/bundles/{manifest.digest}"
    return BundlePublic(digest=manifest.digest, bytes=manifest.bytes, missing=store.missing(manifest))


@router.get("/{digest}")
def show_bundle(digest: Digest, store: BundlesDep) -> BundleDetail:
    """A bundle's files and their pieces, and the pieces that the control plane lacks."""
    manifest = store.manifest(digest)
    missing = store.missing(manifest)
    return BundleDetail(digest=digest, bytes=manifest.bytes, missing=missing, files=manifest.files)


@router.put("/{digest}/pieces/{piece}", status_code=204, response_class=Response, max_body_size=PIECE_BYTES)
def put_piece(digest: Digest, piece: Piece, data: Annotated[bytes, Body(media_type=OCTETS)], store: BundlesDep) -> None:
    """Send a piece's bytes; sending one twice changes nothing."""
    store.put(digest, piece, data)


@router.get(
    "/{digest}/pieces/{piece}",
    response_class=Response,
    responses={200: {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_piece(digest: Digest, piece: Piece, store: BundlesDep) -> Response:
    """A piece's bytes."""
    return Response(store.piece(digest, piece), media_type=OCTETS)
