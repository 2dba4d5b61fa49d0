"""Webhooks over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.deps import Cursor, Limit, WebhooksDep
from api.webhooks.schemas import (
    DeliveryPage,
    DeliveryPublic,
    WebhookChange,
    WebhookList,
    WebhookPublic,
    WebhookRequest,
    WebhookWithSecret,
)

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

WebhookId = Annotated[str, Path(max_length=64)]
DeliveryId = Annotated[str, Path(max_length=64, description="the delivery's id, which is the header webhook-id")]


@router.post("", status_code=201)
def create_webhook(request: WebhookRequest, service: WebhooksDep, response: Response) -> WebhookWithSecret:
    """Have notifications posted to an address. The secret that signs them is in this answer only."""
    hook = service.create(request)
    response.headers["Location"] = f"/v1/webhooks/{hook.id}"
    return hook


@router.get("")
def list_webhooks(service: WebhooksDep) -> WebhookList:
    """All webhooks, newest first."""
    return service.list()


@router.get("/{webhook_id}")
def show_webhook(webhook_id: WebhookId, service: WebhooksDep) -> WebhookPublic:
    """A webhook by its id."""
    return service.show(webhook_id)


@router.patch("/{webhook_id}")
def change_webhook(webhook_id: WebhookId, change: WebhookChange, service: WebhooksDep) -> WebhookWithSecret:
    """Change a webhook, switch it off or on, or give it another secret."""
    return service.change(webhook_id, change)


@router.delete("/{webhook_id}", status_code=204, response_class=Response)
def delete_webhook(webhook_id: WebhookId, service: WebhooksDep) -> None:
    """Delete a webhook and its deliveries."""
    service.delete(webhook_id)


@router.post("/{webhook_id}/test", status_code=202)
def test_webhook(webhook_id: WebhookId, service: WebhooksDep) -> DeliveryPublic:
    """Send a `ping`, without retries; the deliveries show its outcome a moment later."""
    return service.ping(webhook_id)


@router.get("/{webhook_id}/deliveries")
def list_deliveries(
    webhook_id: WebhookId, service: WebhooksDep, cursor: Cursor = None, limit: Limit = 50
) -> DeliveryPage:
    """The webhook's deliveries, pending ones included, with their attempts; newest first."""
    return service.deliveries(webhook_id, cursor, limit)


@router.get("/{webhook_id}/deliveries/{delivery_id}")
def show_delivery(webhook_id: WebhookId, delivery_id: DeliveryId, service: WebhooksDep) -> DeliveryPublic:
    """A delivery by its id, with its state and its attempts."""
    return service.delivery(webhook_id, delivery_id)


@router.post("/{webhook_id}/deliveries/{delivery_id}/redeliver", status_code=202)
def redeliver(webhook_id: WebhookId, delivery_id: DeliveryId, service: WebhooksDep) -> DeliveryPublic:
    """Send a notification again, under the same id."""
    return service.redeliver(webhook_id, delivery_id)
