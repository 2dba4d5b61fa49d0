"""A control plane with a public address, and machines that join through its gateway."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket

from api.gateway.app import Gateway
from computeshare.protocol.keys import JobKeys
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.transport.forwarder import ADMITTED, GatewayAccess
from computeshare.worker.invite import join

HEX = "0123456789abcdef" * 2
"""A session's or a submission's id."""
JOB = "someone"


def seated(redis: Redis, machine: str, job_id: str = JOB) -> tuple[str, JobKeys]:
    """A worker of a machine that has a seat in a job, and the job's keys."""
    worker, keys = f"{machine}work", JobKeys(job_id)
    redis.hset(keys.seats(), worker, f"{worker}-{job_id}-0-1")
    return worker, keys


class Plane:
    """A control plane with a public address."""

    def __init__(self, url: str, app: Any, settings: Settings) -> None:
        self.url, self.app = url, app
        self.owner = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {settings.ensure_token()}"})

    @property
    def gateway(self) -> Gateway:
        found: Gateway = self.app.state.services.gateway
        return found

    def invite(self, **wanted: Any) -> tuple[dict[str, Any], str]:
        """A new invite, and its link by the address that the server really has."""
        made = self.owner.post("/v1/invites", json={"queue": "mnist", **wanted}).json()
        return made, f"{self.url}#{made['url'].rpartition('/')[2]}"

    def joined(self, home: Path, **wanted: Any) -> tuple[str, GatewayAccess]:
        """A machine that has joined: its id and its access."""
        made, link = self.invite(**wanted)
        found = join(link, "anna's mac", home)
        assert found.gateway is not None and found.redis_url == "" and found.queue == "mnist"
        return made["id"], found.gateway

    def asked(self, access: GatewayAccess, **options: Any) -> ClientConnection:
        """A WebSocket whose challenge is not answered yet."""
        headers = {"Authorization": access.authorization}
        url = "ws" + access.url.removeprefix("http")
        return websocket(url, additional_headers=headers, proxy=None, legacy=True, **{"compression": None, **options})

    def open(self, access: GatewayAccess, key: SigningKey | None = None, **options: Any) -> ClientConnection:
        """A WebSocket to the broker. Raises InvalidStatus, ConnectionClosed."""
        link = self.asked(access, **options)
        challenge = link.recv(5)
        assert isinstance(challenge, bytes)
        link.send(access.proof(key or access.key.current(), challenge))
        assert link.recv(5) == ADMITTED
        return link


def refusal(opens: Callable[[], object]) -> tuple[int, str]:
    """The HTTP status, or the WebSocket's closing code, by which a gateway refuses; and its words."""
    with pytest.raises((InvalidStatus, ConnectionClosed)) as found:
        opens()
    if isinstance(found.value, InvalidStatus):
        return found.value.response.status_code, (found.value.response.body or b"").decode()
    assert isinstance(found.value, ConnectionClosed) and found.value.rcvd is not None
    return found.value.rcvd.code, found.value.rcvd.reason
