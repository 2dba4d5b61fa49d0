"""The pages of tokens and of the audit log."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from api.access.audit import ACTIONS
from api.access.caller import Scope
from api.deps import AuditDep, TokensDep
from api.pages.page_response import PageRoute, render

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, route_class=PageRoute)

ALLOWS: dict[Scope, str] = {
    "jobs:read": "See jobs, their logs and weights",
    "jobs:write": "Create, change and delete jobs, too",
    "workers:read": "See workers and queues",
    "workers:join": "Invite machines",
    "admin": "Everything, also tokens, webhooks and workers",
}
"""The permissions that each scope grants, in words."""


@router.get("/tokens")
def show_tokens(request: Request, service: TokensDep) -> HTMLResponse:
    """The tokens, with their scopes, expiry and last use."""
    return render(request, "tokens.html", tokens=service.list().items, scopes=ALLOWS)


@router.get("/audit")
def show_audit(
    request: Request,
    service: AuditDep,
    actor: Annotated[str, Query(max_length=100)] = "",
    action: Annotated[str, Query(max_length=100)] = "",
    subject: Annotated[str, Query(max_length=100)] = "",
    cursor: str = "",
) -> HTMLResponse:
    """Who changed what, filtered by who, what and which."""
    chosen = {"actor": actor, "action": action, "subject": subject}

    def link(**query: str) -> str:
        return "/audit?" + urlencode({name: value for name, value in (chosen | query).items() if value})

    page = service.list(actor, action, subject.strip(), cursor or None)
    return render(
        request,
        "audit.html",
        page=page,
        chosen=chosen,
        cursor=cursor,
        actors=service.actors(),
        actions=ACTIONS,
        link=link,
    )
