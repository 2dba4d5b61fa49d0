"""Webhooks over REST: where to send notifications, and which were sent."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from computeshare.client.api.models import items, json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/webhooks"


class Webhooks:
    """The webhooks of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def list(self) -> list[dict[str, Any]]:
        """All webhooks, newest first."""
        return items(self._requests.repeatable("GET", PATH))[0]

    def show(self, webhook_id: str) -> dict[str, Any]:
        """One webhook."""
        return json_object(self._requests.repeatable("GET", _path(webhook_id)))

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Create a webhook that posts to `request["url"]`. Only this answer holds the notifications' signing secret."""
        return json_object(self._requests.once("POST", PATH, json=dict(request)))

    def change(self, webhook_id: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change the given fields: `url`, `events`, `job_id`, `queue`, `active`, `new_secret`."""
        return json_object(self._requests.once("PATCH", _path(webhook_id), json=dict(change)))

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook and the record of its deliveries."""
        self._requests.once("DELETE", _path(webhook_id))

    def ping(self, webhook_id: str) -> dict[str, Any]:
        """Send a test notification; returns its delivery, whose outcome `delivery` tells later."""
        return json_object(self._requests.once("POST", _path(webhook_id, "test")))

    def deliveries(self, webhook_id: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield a webhook's deliveries, sent or pending, newest first; `limit` of them or all."""
        return self._requests.listed(_path(webhook_id, "deliveries"), {}, limit)

    def delivery(self, webhook_id: str, delivery_id: str) -> dict[str, Any]:
        """One delivery and its outcome."""
        return json_object(self._requests.repeatable("GET", _path(webhook_id, "deliveries", delivery_id)))

    def redeliver(self, webhook_id: str, delivery_id: str) -> dict[str, Any]:
        """Send a notification again, under the same id."""
        return json_object(self._requests.once("POST", _path(webhook_id, "deliveries", delivery_id, "redeliver")))


def _path(webhook_id: str, *parts: str) -> str:
    return "/".join([PATH, *(quote(part, safe="") for part in (webhook_id, *parts))])
