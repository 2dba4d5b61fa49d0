"""Tokens, links to jobs, and the audit log over REST."""

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

    def links(self, job_id: str) -> list[dict[str, Any]]:
        """The read-only links to a job, newest first, without their addresses."""
        return items(self._requests.repeatable("GET", _links(job_id)))[0]

    def create_link(self, job_id: str, days: int | None = 30) -> dict[str, Any]:
        """Make a link that shows one job's page to whoever has it, for `days` (None: until it is revoked). Only this
        answer holds the link.
        """
        return json_object(self._requests.once("POST", _links(job_id), json={"days": days}))

    def revoke_link(self, job_id: str, link_id: str) -> None:
        """Revoke a link to a job."""
        self._requests.once("DELETE", f"{_links(job_id)}/{quote(link_id, safe='')}")

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


def _links(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}/links"
