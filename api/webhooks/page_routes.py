"""The webhooks' page. Without JavaScript it is for reading; with JavaScript it changes webhooks over REST."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from api.deps import WebhooksDep
from api.pages.page_response import render
from api.webhooks.schemas import DEFAULT_EVENTS, EventName

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
SHOWN = 20
"""The number of newest deliveries shown for each webhook."""
EVENTS: dict[EventName, str] = {
    "completed": "Completed",
    "failed": "Failed",
    "held": "Paused by an error",
    "cancelled": "Cancelled",
    "created": "Created",
    "paused": "Paused by a user",
    "resumed": "Resumed",
    "retried": "Retried",
    "scored": "Version scored",
    "checkpoint": "Checkpoint",
    "worker_joined": "Worker joined",
    "worker_left": "Worker left",
    "worker_banned": "Worker banned",
}
"""The events' labels, most interesting first."""


@router.get("/webhooks")
def show_webhooks(request: Request, service: WebhooksDep) -> HTMLResponse:
    """The webhooks, each with its newest deliveries."""
    hooks = service.overview(SHOWN)
    return render(request, "webhooks.html", hooks=hooks, events=EVENTS, chosen=DEFAULT_EVENTS, shown=SHOWN)
