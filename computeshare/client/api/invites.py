"""Invites over REST: links that admit one worker, once."""

from typing import Any
from urllib.parse import quote

from computeshare.client.api.models import items, json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/invites"


class Invites:
    """The invites of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def list(self) -> list[dict[str, Any]]:
        """The invites of the last day, newest first, without their links."""
        return items(self._requests.repeatable("GET", PATH))[0]

    def show(self, invite_id: str) -> dict[str, Any]:
        """An invite: its `status`, and the `worker` that accepted it."""
        return json_object(self._requests.repeatable("GET", _path(invite_id)))

    def create(self, queue: str, minutes: int, days: int | None = None, person: str | None = None) -> dict[str, Any]:
        """Create a link that admits one worker, once, within `minutes`. Only this answer holds the link.

        Args:
            days: until the machine's access to the gateway ends; None: it does not end by itself.
            person: for whom it is: the machine's contributions count as theirs.
        """
        chosen = {"days": days, "person": person}
        body = {"queue": queue, "minutes": minutes} | {name: value for name, value in chosen.items() if value}
        return json_object(self._requests.once("POST", PATH, json=body))

    def withdraw(self, invite_id: str) -> None:
        """Make an invite invalid, and cut off the machine that joined by it through the gateway."""
        self._requests.once("DELETE", _path(invite_id))


def _path(invite_id: str) -> str:
    return f"{PATH}/{quote(invite_id, safe='')}"
