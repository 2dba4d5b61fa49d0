"""HTTPS by `up` itself: with `--tls self`, the line that an invite prints is all that the other machine needs."""

import os
import shlex
import shutil
import ssl
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from api.fleet.worker_wheel import FILE, PATH
from bench.gateway import certify
from computeshare.errors import SettingsError
from computeshare.up.embedded_broker import free_port
from computeshare.worker.invite import join
from tests.support.control_plane import DIGITS_MLP, ControlPlane, control_plane
from tests.support.requirements import lacking

pytestmark = pytest.mark.e2e
PORT = free_port()
PUBLIC = f"https://localhost:{PORT}"
UP = ("--public-url", PUBLIC, "--tls", "self", "--tls-port", str(PORT))


def test_the_invites_one_line_starts_a_worker_that_trains_over_tls(plane: ControlPlane, tmp_path: Path) -> None:
    made = plane.http.post("/v1/invites", json={"queue": "tls"}).json()
    program, *arguments = shlex.split(made["command"])
    assert program == "computeshare-worker" and "--tls-fingerprint" in arguments
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMPUTESHARE_")}
    command = [sys.executable, "-m", "computeshare.worker.process", *arguments, "--home", str(tmp_path)]
    with open(tmp_path / "worker.log", "wb") as log:
        worker = subprocess.Popen(command, env=kept, stdout=log, stderr=log)
    try:
        job = plane.finish(plane.create(**{**DIGITS_MLP, "queue": "tls", "rounds": 40, "evaluate_every": 0}))
        assert job["bytes_up"] > 0
    finally:
        worker.terminate()
        assert worker.wait(20) == 0
    assert (plane.home / "tls" / "key.pem").stat().st_mode & 0o077 == 0


def test_the_line_for_a_new_machine_fetches_the_wheel_from_the_pinned_key_alone(
    plane: ControlPlane, tmp_path: Path
) -> None:
    if not shutil.which("curl"):
        lacking("no curl, by which the wheel is fetched")
    made = plane.http.post("/v1/invites", json={"queue": "tls"}).json()
    fetching, _, installing = made["new_machine"][0].partition(" && ")
    fetch = shlex.split(fetching)
    assert subprocess.run(fetch, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / FILE).read_bytes() == plane.http.get(PATH).content
    assert installing == f"uvx --from ./{FILE} {made['command']}"
    (tmp_path / FILE).unlink()
    pinned = fetch.index("--pinnedpubkey") + 1
    fetch[pinned] = f"sha256//{'A' * 43}="
    assert subprocess.run(fetch, cwd=tmp_path, timeout=60, check=False).returncode == 90  # another key
    assert not (tmp_path / FILE).exists()


def test_another_certificate_is_not_trusted_and_the_code_stays_unused(plane: ControlPlane, tmp_path: Path) -> None:
    made = plane.http.post("/v1/invites", json={"queue": "tls"}).json()
    link, _, fingerprint = made["command"].split("--join ")[1].partition(" --tls-fingerprint ")
    with pytest.raises(SettingsError, match="another certificate than the invite says"):
        join(link, "mac", tmp_path, "0" * 64)
    with pytest.raises(SettingsError, match="no control plane answers") as error:
        join(link, "mac", tmp_path)  # by the system's certificates
    assert "certificate" in str(error.value)
    with pytest.raises(SettingsError, match="64 hexadecimal digits"):
        join(link, "mac", tmp_path, "abc")
    assert plane.get(f"/v1/invites/{made['id']}")["status"] == "pending"
    assert join(link, "mac", tmp_path, fingerprint.upper()).gateway is not None


def test_a_certificate_of_ones_own_is_served(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        lacking("no openssl")
    certify(tmp_path)
    port, files = free_port(), ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with control_plane(
        tmp_path / "home", *files, "--tls-port", str(port), "--public-url", f"https://localhost:{port}"
    ) as up:
        served = ssl.get_server_certificate(("localhost", port))
        assert ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())
        made = up.http.post("/v1/invites", json={"queue": "own"}).json()
        link = made["command"].split("--join ")[1].split()[0]
        assert link.startswith(f"https://localhost:{port}#")
        with pytest.raises(SettingsError, match="no control plane answers"):
            join(link, "mac", tmp_path)  # by the system's certificates, of which this is none
        assert join(link, "mac", tmp_path, sha256(ssl.PEM_cert_to_DER_cert(served)).hexdigest()).gateway is not None
