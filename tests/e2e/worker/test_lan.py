"""`up --lan`: an invite names this machine's address on its network, and the certificate that it pins."""

import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from computeshare.errors import SettingsError
from computeshare.up.embedded_broker import free_port
from computeshare.up.lan_address import lan_address
from computeshare.worker.invite import join
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.requirements import lacking

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--lan", "--tls-port", str(PORT), "--workers", "1", "--queue", "default")


@pytest.fixture(scope="module", autouse=True)
def network() -> None:
    try:
        lan_address()
    except SettingsError:
        lacking("no network but the loopback")


def test_an_invite_made_at_the_loopback_admits_a_machine_by_the_address_on_the_network(
    plane: ControlPlane, tmp_path: Path
) -> None:
    made = plane.http.post("/v1/invites", json={"queue": "default"}).json()
    assert (made["note"], made["remedy"]) == (None, None)
    _, flag, link, pin, fingerprint = shlex.split(made["command"])
    assert (flag, pin) == ("--join", "--tls-fingerprint")
    assert urlsplit(link).netloc == f"{lan_address()}:{PORT}"
    joined = join(link, "mac", tmp_path, fingerprint)
    assert joined.gateway and joined.gateway.url == f"https://{lan_address()}:{PORT}/v1/gateway"
    assert plane.get(f"/v1/invites/{made['id']}")["worker"] == "mac"


def test_its_own_workers_train_as_without_it(plane: ControlPlane) -> None:
    job = plane.finish(plane.create(**{**DIGITS_MLP, "queue": "default", "rounds": 20}))
    assert job["version"] == 20
