"""Invites: one machine each, once, for a short while; and the worker's side of taking one up."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from serving import serving
from sqlalchemy import update
from starlette.testclient import TestClient

from api.database import Database, now_ms
from api.services.invites import INVITE, is_local
from computeshare.errors import SettingsError
from computeshare.joining import join
from computeshare.settings import Settings


@pytest.fixture
def plane(tmp_path: Path, redis_url: str) -> Iterator[tuple[str, Settings]]:
    """A control plane on a socket, and the headers of its owner."""
    settings = Settings(home=tmp_path / "plane", redis_url=redis_url)
    with serving(settings) as (url, _):
        yield url, settings


def invite(client: TestClient, queue: str = "mnist") -> dict[str, str]:
    answer = client.post("/v1/invites", json={"queue": queue})
    assert answer.status_code == 201
    found: dict[str, str] = answer.json()
    assert answer.headers["location"] == f"/v1/invites/{found['id']}"
    return found


def path_of(made: dict[str, str]) -> str:
    return "/join/" + made["url"].rpartition("/")[2]


def test_an_invite_says_what_to_type_and_shows_its_code_once(client: TestClient) -> None:
    made = invite(client)
    assert made["command"] == f"computeshare-worker --queue mnist --join {made['url']}"
    assert made["qr"].startswith("data:image/svg+xml")
    shown = client.get(f"/v1/invites/{made['id']}").json()
    assert (shown["status"], shown["worker"], shown.get("url")) == ("pending", None, None)
    code = made["url"].rpartition("/")[2]
    assert code not in client.get("/v1/invites").text


def test_a_machine_elsewhere_is_told_that_the_broker_is_out_of_its_reach(client: TestClient) -> None:
    made = invite(client)
    del client.headers["authorization"]
    refused = client.post(path_of(made), json={"name": "anna's mac"})  # a test client has no address of this machine
    assert refused.status_code == 409
    assert "its own machine only" in refused.json()["detail"]
    assert made["note"] is not None


def test_exchange_over_loopback_gives_the_broker_and_the_next_start_keeps_it(
    plane: tuple[str, Settings], tmp_path: Path
) -> None:
    url, settings = plane
    headers = {"Authorization": f"Bearer {settings.ensure_token()}"}
    with httpx2.Client(base_url=url, headers=headers) as owner:
        made = owner.post("/v1/invites", json={"queue": "mnist"}).json()
        assert join(made["url"], "anna's mac", tmp_path / "worker") == settings.redis_url
        assert join(made["url"], "anna's mac", tmp_path / "worker") == settings.redis_url  # as when it starts again
        with pytest.raises(SettingsError, match="was used already"):
            join(made["url"], "another", tmp_path / "other")
        shown = owner.get(f"/v1/invites/{made['id']}").json()
        assert (shown["status"], shown["worker"]) == ("joined", "anna's mac")
    kept = tmp_path / "worker" / "joined.json"
    assert kept.stat().st_mode & 0o077 == 0


def test_what_is_no_invite_is_said_so_without_repeating_its_code(plane: tuple[str, Settings], tmp_path: Path) -> None:
    url, _ = plane
    with pytest.raises(SettingsError, match="no such invite") as error:
        join(f"{url}/join/sesame", "mac", tmp_path)
    assert "sesame" not in str(error.value)
    with pytest.raises(SettingsError, match="is no invite's link"):
        join(f"{url}/healthz", "mac", tmp_path)
    with pytest.raises(SettingsError, match="no control plane answers"):
        join("http://127.0.0.1:1/join/x", "mac", tmp_path)


def test_an_invite_expires_and_can_be_withdrawn(client: TestClient, database: Database) -> None:
    made = invite(client)
    with database.writing() as connection:
        connection.execute(update(INVITE).where(INVITE.c.id == made["id"]).values(expires_ms=now_ms() - 1))
    assert client.get(f"/v1/invites/{made['id']}").json()["status"] == "expired"
    page = client.get(path_of(made), headers={"accept": "text/html"})
    assert "has expired" in page.text
    assert client.delete(f"/v1/invites/{made['id']}").status_code == 204
    assert client.delete(f"/v1/invites/{made['id']}").status_code == 404
    assert client.get(path_of(made)).status_code == 404


@pytest.mark.parametrize("body", [{"queue": "no spaces"}, {"minutes": 0}, {"minutes": True}, {"more": 1}], ids=str)
def test_what_cannot_be_is_refused(client: TestClient, body: dict[str, object]) -> None:
    assert client.post("/v1/invites", json=body).status_code == 422


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("unix:///tmp/broker.sock", True),
        ("redis://127.0.0.1:6379/0", True),
        ("redis://:secret@localhost/0", True),
        ("redis://[::1]:6379", True),
        ("rediss://broker.example:6379", False),
        ("redis://192.168.1.4:6379", False),
    ],
    ids=str,
)
def test_a_broker_that_others_cannot_reach_is_told(url: str, local: bool) -> None:
    assert is_local(url) is local
