"""Tokens and the audit log over REST."""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from computeshare.client.api.models import items, json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/tokens"


class Access:
    """Who may do what at one control plane, and who did what."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def tokens(self) -> list[dict[str, Any]]:
        """All tokens, newest first, without their texts."""
        return items(self._requests.repeatable("GET", PATH))[0]

    def create_token(self, name: str, scopes: Sequence[str], days: int | None = 90) -> dict[str, Any]:
        """Make a token that expires after `days` (None: never). Only this answer holds its text."""
        return json_object(self._requests.once("POST", PATH, json={"name": name, "scopes": list(scopes), "days": days}))

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token; browsers that logged in with it are logged out."""
        self._requests.once("DELETE", f"{PATH}/{quote(token_id, safe='')}")

    def audit(
        self,
        actor: str | None = None,
        action: str | None = None,
        subject: str | None = None,
        limit: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield who changed what, newest first; `limit` entries or all.

        Args:
            actor: only changes by the token of this name; `the owner` is the token in HOME/token.
            action: only changes of this kind, such as `job.cancel`.
            subject: only changes of this id.
        """
        return self._requests.listed("/v1/audit", {"actor": actor, "action": action, "subject": subject}, limit)
