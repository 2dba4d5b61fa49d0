"""A control plane with a public address, and machines that join through its gateway."""

from pathlib import Path
from typing import Any

import httpx2
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket

from api.gateway.app import Gateway
from computeshare.settings import Settings
from computeshare.transport.forwarder import GatewayAccess
from computeshare.worker.invite import join


class Plane:
    """A control plane with a public address."""

    def __init__(self, url: str, app: Any, settings: Settings) -> None:
        self.url, self.app = url, app
        self.owner = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {settings.ensure_token()}"})

    @property
    def gateway(self) -> Gateway:
        found: Gateway = self.app.state.services.gateway
        return found

    def invite(self) -> tuple[dict[str, Any], str]:
        """A new invite, and its link by the address that the server really has."""
        made = self.owner.post("/v1/invites", json={"queue": "mnist"}).json()
        return made, f"{self.url}#{made['url'].rpartition('/')[2]}"

    def joined(self, home: Path) -> tuple[str, GatewayAccess]:
        """A machine that has joined: its id and its access."""
        made, link = self.invite()
        found = join(link, "anna's mac", home)
        assert found.gateway is not None and found.redis_url == "" and found.queue == "mnist"
        return made["id"], found.gateway

    def open(self, access: GatewayAccess, **options: Any) -> ClientConnection:
        headers = {"Authorization": f"Bearer {access.credential}"}
        url = "ws" + access.url.removeprefix("http")
        return websocket(url, additional_headers=headers, proxy=None, **{"compression": None, **options})
