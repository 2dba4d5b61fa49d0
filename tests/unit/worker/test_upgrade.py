"""When a worker is replaced by the control plane's version, and when not."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from computeshare.errors import VersionError
from computeshare.protocol.handshake import OURS, Release
from computeshare.worker import upgrade
from computeshare.worker.upgrade import fetch, told

FILE = "computeshare_worker-9.9.9-py3-none-any.whl"


def test_a_newer_release_is_installed_and_an_older_one_is_said_to_be_older() -> None:
    ours = Release("0.3.0", 8)
    assert told(ours, Release("0.4.0", 9)).startswith("upgrading from")
    assert told(ours, Release("0.3.0", 9)).startswith("upgrading from")
    assert told(ours, Release("0.2.0", 7)).startswith("the control plane is older: going back from")


@pytest.mark.parametrize(
    ("offered", "why"),
    [(Release("0.0.9", 7), "goes back to 0.1.0 at most"), (OURS, "which runs here"), (Release("new", 8), "no version")],
)
def test_a_release_below_the_floor_the_same_one_and_a_nameless_one_are_refused(offered: Release, why: str) -> None:
    with pytest.raises(VersionError, match=why):
        told(OURS, offered)


def test_a_worker_from_a_checkout_is_not_replaced() -> None:
    assert not upgrade.can_upgrade()
    with pytest.raises(VersionError, match="runs from a checkout"):
        upgrade.upgrade(None, [])


def test_without_an_encrypted_connection_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "can_upgrade", lambda: True)
    with pytest.raises(VersionError, match="joined by an invite with https"):
        upgrade.upgrade(None, [])


class Plane:
    """Answers as a control plane would, with what a test says."""

    def __init__(self) -> None:
        self.release: Any = {"version": "9.9.9", "protocol": 99, "file": FILE, "sha256": ""}
        self.content = b"a wheel"
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(plane.release).encode() if self.path.endswith("/release") else plane.content
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def plane() -> Iterator[Plane]:
    found = Plane()
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def test_the_wheel_that_is_fetched_has_the_digest_that_the_release_names(plane: Plane, tmp_path: Path) -> None:
    plane.release["sha256"] = hashlib.sha256(plane.content).hexdigest()
    path, offer = fetch(plane.url, "", tmp_path)
    assert path.read_bytes() == plane.content and offer.release == Release("9.9.9", 99)
    plane.content = b"another wheel"
    with pytest.raises(VersionError, match="another digest"):
        fetch(plane.url, "", tmp_path)


@pytest.mark.parametrize(
    "release", [[], {}, {"file": "../../evil.whl"}, {"file": "computeshare_worker-1/../x-py3-none-any.whl"}]
)
def test_an_answer_that_names_no_wheel_writes_no_file(plane: Plane, tmp_path: Path, release: Any) -> None:
    plane.release = {**plane.release, **release} if release else release
    with pytest.raises(VersionError, match="cannot be fetched"):
        fetch(plane.url, "", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_end_is_given_up(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "LARGEST_BYTES", 3)
    with pytest.raises(VersionError, match="larger than 3 bytes"):
        fetch(plane.url, "", tmp_path)


def test_a_control_plane_that_is_away_is_said_to_be_away(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="cannot be fetched"):
        fetch("http://127.0.0.1:9", "", tmp_path)


def test_what_installs_wheels_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UV", str(tmp_path / "no-uv"))
    with pytest.raises(VersionError, match=r"cannot be installed: .*no-uv"):
        upgrade.install(tmp_path / FILE)
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(upgrade.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(VersionError, match="neither uv nor pip"):
        upgrade.install(tmp_path / FILE)
