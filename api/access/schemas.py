"""The REST API's schemas for tokens, links and the audit log."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.access.caller import RESERVED, Scope
from api.schemas import Instant


def _name(text: str) -> str:
    name = " ".join(text.split())
    if not name or not name.isprintable():
        raise ValueError("must have visible characters, and no others than those")
    if name.casefold() in RESERVED:
        raise ValueError(f"must not be {name}, which the timeline uses for others")
    return name


Days = Annotated[int, Field(ge=1, le=3650)]


class TokenRequest(BaseModel):
    """A new token: its name, its scopes and its lifetime."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=50), AfterValidator(_name)] = Field(
        description="whose it is, or what for; the timeline and the audit log show it"
    )
    scopes: list[Scope] = Field(min_length=1, max_length=10, description="jobs:write includes jobs:read; admin all")
    days: Days | None = Field(90, description="days until it expires; null: never")


class TokenPublic(BaseModel):
    """A token, without its text."""

    id: str
    name: str
    scopes: list[Scope]
    created_at: Instant
    created_by: str
    expires_at: Instant | None = Field(description="null: never")
    expired: bool
    used_at: Instant | None = Field(description="last use, to the minute; null: not used yet")


class TokenCreated(TokenPublic):
    """A new token with its text; later answers do not contain the text."""

    token: str
    login_url: str = Field(description="the link that logs a browser in with this token")


class TokenList(BaseModel):
    items: Sequence[TokenPublic]


class LinkRequest(BaseModel):
    """A new read-only link to a job."""

    model_config = ConfigDict(extra="forbid", strict=True)

    days: Days | None = Field(30, description="days until it expires; null: never")


class LinkPublic(BaseModel):
    """A read-only link to a job's page, without its address."""

    id: str
    job_id: str
    created_at: Instant
    created_by: str
    expires_at: Instant | None = Field(description="null: never")
    expired: bool
    used_at: Instant | None = Field(description="last use, to the minute; null: not used yet")


class LinkCreated(LinkPublic):
    """A new link with its address; later answers do not contain the address."""

    url: str


class LinkList(BaseModel):
    items: Sequence[LinkPublic]


class AuditEntry(BaseModel):
    """Who did what."""

    id: int
    at: Instant
    actor: str = Field(description="the token's name; `the owner` for the token in HOME/token")
    token_id: str | None = Field(description="null: the token in HOME/token")
    address: str = Field(description="the client's address; behind a proxy, what the proxy says")
    action: str
    subject: str = Field(description="id of what was changed")
    detail: dict[str, Any]


class AuditPage(BaseModel):
    items: list[AuditEntry]
    next_cursor: str | None
