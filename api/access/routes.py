"""Tokens and the audit log over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from api.access.audit import Action
from api.access.schemas import (
    AuditPage,
    TokenCreated,
    TokenList,
    TokenRequest,
)
from api.deps import AuditDep, Cursor, Limit, TokensDep
from computeshare.settings import login_path

router = APIRouter(prefix="/v1", tags=["access"])

TokenId = Annotated[str, Path(max_length=64)]
SECRET = {"Cache-Control": "no-store"}


@router.post("/tokens", status_code=201)
def create_token(body: TokenRequest, service: TokensDep, request: Request, response: Response) -> TokenCreated:
    """Make a token with scopes. Its text is in this answer only."""
    made, token = service.create(body)
    response.headers.update(SECRET | {"Location": "/v1/tokens"})
    login_url = str(request.base_url).rstrip("/") + login_path(token)
    return TokenCreated(**made.model_dump(), token=token, login_url=login_url)


@router.get("/tokens")
def list_tokens(service: TokensDep) -> TokenList:
    """All tokens, newest first, without their texts; without the owner's own, which is in a file."""
    return service.list()


@router.delete("/tokens/{token_id}", status_code=204, response_class=Response)
def revoke_token(token_id: TokenId, service: TokensDep) -> None:
    """Revoke a token: nothing accepts it from now on, and its event streams and logins end."""
    service.revoke(token_id)


@router.get("/audit")
def list_audit(
    service: AuditDep,
    actor: Annotated[str | None, Query(max_length=100, description="name of a token, or `the owner`")] = None,
    action: Action | None = None,
    subject: Annotated[str | None, Query(max_length=100, description="id of what was changed")] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> AuditPage:
    """Who changed what in the last 90 days, newest first."""
    return service.list(actor, action, subject, cursor, limit)
