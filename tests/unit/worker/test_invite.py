"""Taking up an invite against servers that behave and that do not, and what a worker knows afterwards."""

import json
import socket
from pathlib import Path

import pytest

from computeshare.errors import SettingsError, Unreachable
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import RunFile, Settings
from computeshare.worker.invite import join, last_joined
from tests.support.http_answers import Answer, FakeServer

FIRST, SECOND = "rediss://:one@broker:6379/0", "rediss://:two@broker:6379/0"


def take_up(server: FakeServer, code: str, home: Path, address: str = FIRST) -> str:
    server.on(f"POST /join/{code}", Answer({"redis_url": address, "queue": "mnist"}))
    return join(f"{server.url}/join/{code}", "mac", home).redis_url


def test_a_worker_finds_its_broker_by_setting_by_run_file_and_where_it_joined_last(
    server: FakeServer, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, redis_url=None)

    def broker_url(settings: Settings) -> str:
        return last_joined(settings).redis_url

    with pytest.raises(Unreachable, match=r"start `computeshare up`.*or take up an invite"):
        broker_url(settings)
    assert take_up(server, "a", tmp_path) == FIRST and broker_url(settings) == FIRST
    assert take_up(server, "b", tmp_path, SECOND) == SECOND and broker_url(settings) == SECOND
    with pytest.raises(Unreachable):
        settings.resolve_redis_url("api")  # the control plane does not go by it
    RunFile(url="http://h", redis_url="redis://running").write(settings.run_path)
    assert broker_url(settings) == "redis://running"
    assert broker_url(settings.model_copy(update={"redis_url": "redis://set"})) == "redis://set"
    others = {"redis_urls": {"worker": "redis://worker@running", "api": "redis://api@running"}}
    RunFile(url="http://h", redis_url="redis://running", **others).write(settings.run_path)
    assert broker_url(settings) == "redis://worker@running"
    assert settings.resolve_redis_url("api") == "redis://api@running"
    assert settings.resolve_redis_url("reducer") == "redis://running"
    assert settings.resolve_gateway_redis_url() == "redis://worker@running"
    apart = settings.model_copy(update={"redis_url": "redis://set", "gateway_redis_url": "redis://worker@set"})
    assert (broker_url(apart), apart.resolve_gateway_redis_url()) == ("redis://set", "redis://worker@set")


def test_a_worker_knows_the_key_of_the_control_plane_whose_broker_it_uses(server: FakeServer, tmp_path: Path) -> None:
    here, theirs, given = (SigningKey.new().public for _ in range(3))
    home = Settings(home=tmp_path, redis_url=None)
    server.on("POST /join/a", Answer({"redis_url": FIRST, "queue": "mnist", "control_key": theirs}))
    join(f"{server.url}/join/a", "mac", tmp_path)
    (tmp_path / "control.pub").write_text(here + "\n")
    assert last_joined(home).control_key == theirs
    RunFile(url="http://h", redis_url="redis://running").write(home.run_path)
    assert last_joined(home).control_key == here
    named = home.model_copy(update={"redis_url": "redis://another"})
    assert last_joined(named).control_key == ""  # that broker may be another control plane's
    assert last_joined(named.model_copy(update={"control_key": given})).control_key == given


@pytest.mark.parametrize("kept", ["", "[]", "{}", "{"])
def test_what_was_kept_and_says_nothing_is_nothing(kept: str, tmp_path: Path) -> None:
    (tmp_path / "joined.json").write_text(kept)
    with pytest.raises(Unreachable):
        last_joined(Settings(home=tmp_path, redis_url=None))


def test_an_invite_is_not_spent_where_its_address_cannot_be_kept(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"joined\.json cannot be written"):
        take_up(server, "code", tmp_path / "file" / "home")
    assert server.requests == []


def test_an_invite_over_loopback_asks_no_proxy(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert take_up(server, "code", tmp_path) == FIRST
    assert json.loads(server.requests[0].body)["name"] == "mac"


@pytest.mark.parametrize(
    ("answer", "told", "tries_again"),
    [
        (Answer({"detail": "this invite was already used"}, 409), "was already used", False),
        (Answer(b"<h1>It works</h1>"), "is no invite's link", False),
        (Answer({"redis_url": 7}), "is no invite's link", False),
        (Answer({"detail": "no broker is known"}, 503), "no broker is known: try again later", True),
        (Answer(b"<h1>Bad gateway</h1>", 502), "Bad Gateway: try again later", True),
        (Answer(hang_up=True), "no control plane answers there", True),
    ],
    ids=["used", "a page", "nonsense", "starting", "proxy", "gone"],
)
def test_a_refusal_is_for_good_and_an_outage_is_not(
    answer: Answer, told: str, tries_again: bool, server: FakeServer, tmp_path: Path
) -> None:
    server.on("POST /join/sesame", answer)
    with pytest.raises(SettingsError, match=told) as caught:
        join(f"{server.url}/join/sesame", "mac", tmp_path)
    assert isinstance(caught.value, Unreachable) is tries_again
    assert "sesame" not in str(caught.value)


def test_nobody_listening_is_an_outage_and_no_address_is_not(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="no control plane answers there"):
            join(f"http://127.0.0.1:{taken.getsockname()[1]}/join/x", "mac", tmp_path)
    with pytest.raises(SettingsError, match="is no invite's link"):
        join("http://[half/join/x", "mac", tmp_path)
