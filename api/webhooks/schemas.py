"""The REST API's schemas for webhooks."""

import re
from typing import Annotated, Literal

import httpx2
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.schemas import Instant
from api.webhooks.signature import require_secret

EventName = Literal[
    "created",
    "paused",
    "held",
    "resumed",
    "retried",
    "completed",
    "failed",
    "cancelled",
    "checkpoint",
    "scored",
    "worker_joined",
    "worker_left",
    "worker_banned",
]
"""The events that a webhook can choose; `held` is a pause that no user asked for."""
DEFAULT_EVENTS: tuple[EventName, ...] = ("completed", "failed", "held")
_HOST = re.compile(rb"[\w.:-]+", re.ASCII)


def _receiver(text: str) -> str:
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"this is no address: {error}") from error
    if url.scheme not in ("http", "https") or not _HOST.fullmatch(url.raw_host):
        raise ValueError("give the address of a receiver, as https://example.com/hook")
    if url.userinfo:
        raise ValueError("leave out user name and password: notifications are signed instead")
    if url.fragment:
        raise ValueError("leave out what follows the #: it is never sent")
    if url.port is not None and not 0 < url.port < 65536:
        raise ValueError("its port must be from 1 to 65535")
    return str(url)


Receiver = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_receiver)]
Events = Annotated[list[EventName], Field(min_length=1, max_length=30)]
JobFilter = Annotated[str, Field(min_length=1, max_length=64, description="only events of this job")]
QueueFilter = Annotated[str, Field(min_length=1, max_length=64, description="only events of jobs on this queue")]
Secret = Annotated[str, Field(max_length=100), AfterValidator(require_secret)]


class WebhookRequest(BaseModel):
    """A new webhook: its address and the events to notify it of."""

    model_config = ConfigDict(extra="forbid")

    url: Receiver = Field(description="where notifications are posted to")
    events: Events = Field(list(DEFAULT_EVENTS), description="`held` is a pause that no user asked for")
    job_id: JobFilter | None = None
    queue: QueueFilter | None = None
    secret: Secret | None = Field(None, description="what signs them: `whsec_` and base64; made up where none is given")


class WebhookChange(BaseModel):
    """Changes of a webhook. Fields left out or null stay the same, but a null `job_id` or `queue` lifts that
    restriction.
    """

    model_config = ConfigDict(extra="forbid")

    url: Receiver | None = None
    events: Events | None = None
    job_id: JobFilter | None = None
    queue: QueueFilter | None = None
    active: bool | None = Field(None, description="true: continue; what happened meanwhile is not made up for")
    new_secret: bool = Field(False, description="make up another secret, and show it in the answer")


class WebhookPublic(BaseModel):
    """A webhook."""

    id: str
    url: str
    events: list[EventName]
    job_id: str | None
    queue: str | None
    active: bool = Field(description="false: switched off, by a user or because the receiver answered 410 Gone")
    trouble: str | None = Field(description="what was wrong with the last attempt; none where it went well")
    pending: int = Field(description="notifications that wait to be delivered")
    created_at: Instant


class WebhookWithSecret(WebhookPublic):
    """A webhook, with its secret if that is new; the secret is not shown again."""

    secret: str | None


class WebhookList(BaseModel):
    items: list[WebhookPublic]


class AttemptPublic(BaseModel):
    """An attempt to deliver a notification."""

    at: Instant
    status: int | None = Field(description="of the receiver's answer; none where there was no answer")
    error: str | None = Field(description="what went wrong; none where it arrived")
    seconds: float


class DeliveryPublic(BaseModel):
    """A notification, its state and its attempts."""

    id: str = Field(description="the header webhook-id: the same for every attempt")
    event: str
    job_id: str | None
    state: str = Field(description="pending, delivered, failed (given up), or dropped (too many waited, switched off)")
    attempts: list[AttemptPublic] = Field(description="the last 20, oldest first")
    created_at: Instant
    next_attempt_at: Instant | None = Field(description="none unless it is pending")


class DeliveryPage(BaseModel):
    """Deliveries, newest first."""

    items: list[DeliveryPublic]
    next_cursor: str | None
