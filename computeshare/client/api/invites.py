"""Invites over REST: links that let one worker in, once."""

from typing import Any
from urllib.parse import quote

from computeshare.client.api.models import document, items
from computeshare.client.api.requests import Requests

PATH = "/v1/invites"


class Invites:
    """The invites of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def list(self) -> list[dict[str, Any]]:
        """Those of the last day, newest first; none of them holds its link."""
        return items(self._requests.repeatable("GET", PATH))[0]

    def show(self, invite_id: str) -> dict[str, Any]:
        """One of them: its `status`, and by whom it was taken up."""
        return document(self._requests.repeatable("GET", _path(invite_id)))

    def create(self, queue: str, minutes: int) -> dict[str, Any]:
        """A link that lets one worker in, once, within `minutes`: the answer alone holds it."""
        return document(self._requests.once("POST", PATH, json={"queue": queue, "minutes": minutes}))

    def withdraw(self, invite_id: str) -> None:
        """Make an invite useless; a worker that took it up stays."""
        self._requests.once("DELETE", _path(invite_id))


def _path(invite_id: str) -> str:
    return f"{PATH}/{quote(invite_id, safe='')}"
