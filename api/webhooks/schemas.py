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
        raise ValueError(f"not a valid address: {error}") from error
    if url.scheme not in ("http", "https") or not _HOST.fullmatch(url.raw_host):
        raise ValueError("must be an http or https address such as https://example.com/hook")
    if url.userinfo:
        raise ValueError("must not contain a user name or password: notifications are signed instead")
    if url.fragment:
        raise ValueError("must not contain a fragment (#...): fragments are never sent")
    if url.port is not None and not 0 < url.port < 65536:
        raise ValueError("the port must be from 1 to 65535")
    return str(url)


Receiver = Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_receiver)]
Events = Annotated[list[EventName], Field(min_length=1, max_length=30)]
JobFilter = Annotated[str, Field(min_length=1, max_length=64, description="only events of this job")]
QueueFilter = Annotated[str, Field(min_length=1, max_length=64, description="only events of jobs on this queue")]
Secret = Annotated[str, Field(max_length=100), AfterValidator(require_secret)]


class WebhookRequest(BaseModel):
    """A new webhook: its address and the events to notify it of."""

    model_config = ConfigDict(extra="forbid")

    url: Receiver = Field(description="address that notifications are posted to")
    events: Events = Field(list(DEFAULT_EVENTS), description="`held` is a pause that no user asked for")
    job_id: JobFilter | None = None
    queue: QueueFilter | None = None
    secret: Secret | None = Field(
        None, description="key that signs notifications: `whsec_` and base64. Default: a random one"
    )


class WebhookChange(BaseModel):
    """Changes of a webhook. Fields left out or null stay the same, but a null `job_id` or `queue` lifts that
    restriction.
    """

    model_config = ConfigDict(extra="forbid")

    url: Receiver | None = None
    events: Events | None = None
    job_id: JobFilter | None = None
    queue: QueueFilter | None = None
    active: bool | None = Field(None, description="true: switch on; events from the time when it was off are not sent")
    new_secret: bool = Field(False, description="replace the secret with a random one, and show it in the answer")


class WebhookPublic(BaseModel):
    """A webhook."""

    id: str
    url: str
    events: list[EventName]
    job_id: str | None
    queue: str | None
    active: bool = Field(description="false: switched off by a user, or by the receiver's answer 410 Gone")
    trouble: str | None = Field(description="error of the last attempt; null if it succeeded")
    pending: int = Field(description="notifications that wait for delivery")
    created_at: Instant


class WebhookWithSecret(WebhookPublic):
    """A webhook, with its secret if that is new; the secret is not shown again."""

    secret: str | None


class WebhookList(BaseModel):
    items: list[WebhookPublic]


class AttemptPublic(BaseModel):
    """An attempt to deliver a notification."""

    at: Instant
    status: int | None = Field(description="HTTP status of the receiver's answer; null without an answer")
    error: str | None = Field(description="error of the attempt; null if the notification arrived")
    seconds: float


class DeliveryPublic(BaseModel):
    """A notification, its state and its attempts."""

    id: str = Field(description="value of the header webhook-id, the same for every attempt")
    event: str
    job_id: str | None
    state: str = Field(
        description="pending, delivered, failed (given up), or dropped (too many waited, or the webhook is off)"
    )
    attempts: list[AttemptPublic] = Field(description="the last 20, oldest first")
    created_at: Instant
    next_attempt_at: Instant | None = Field(description="null unless the delivery is pending")


class DeliveryPage(BaseModel):
    """Deliveries, newest first."""

    items: list[DeliveryPublic]
    next_cursor: str | None
