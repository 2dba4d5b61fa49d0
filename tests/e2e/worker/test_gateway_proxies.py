"""Behind nginx and Caddy with real TLS, stopped and started in mid-job, three workers train to the same bits."""

import hashlib
import shutil
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.gateway import NGINX, certify, running
from computeshare.up.embedded_broker import free_port
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.requirements import lacking

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PORT = free_port()
UP = ("--public-url", f"https://localhost:{PORT}")
JOB = {**DIGITS_MLP, "rounds": 300, "checkpoint_every": 0, "evaluate_every": 0, "workers": {"min": 1, "max": 3}}
CADDY = """
{{
  admin off
  auto_https off
  storage file_system {folder}/caddy
}}
https://localhost:{port} {{
  bind {host}
  tls {folder}/cert.pem {folder}/key.pem
  reverse_proxy 127.0.0.1:{target}
}}
"""
PROXIES = {
    "nginx": (NGINX, ["nginx", "-e", "{folder}/nginx.log", "-c", "{folder}/proxy.conf"]),
    "caddy": (CADDY, ["caddy", "run", "--adapter", "caddyfile", "--config", "{folder}/proxy.conf"]),
}
"""For each proxy its configuration and its command."""


@pytest.mark.parametrize("name", PROXIES)
def test_three_workers_behind_a_proxy_end_with_the_bits_of_one_beside_the_broker(
    name: str, plane: ControlPlane, tmp_path: Path
) -> None:
    if not (shutil.which(name) and shutil.which("openssl")):
        lacking(f"no {name}, or no openssl")
    certify(tmp_path)
    config, words = PROXIES[name]
    target = urlsplit(plane.url).port
    (tmp_path / "proxy.conf").write_text(config.format(folder=tmp_path, host="127.0.0.1", port=PORT, target=target))
    proxy = [word.format(folder=tmp_path) for word in words]
    certificate = ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())

    def ready() -> None:
        ssl.get_server_certificate(("localhost", PORT))

    with plane.worker(f"near-{name}"):
        near = plane.finish(plane.create(**{**JOB, "queue": f"near-{name}"}))
    with ExitStack() as workers:
        with running(proxy, tmp_path, ready):
            for number in range(3):
                made = plane.http.post("/v1/invites", json={"queue": f"far-{name}"}).json()
                link = made["command"].split()[-1]
                home = tmp_path / f"far-{number}"
                home.mkdir()
                pin = ["--tls-fingerprint", hashlib.sha256(certificate).hexdigest()]
                command = [sys.executable, "-m", "computeshare.worker.process", "--join", link, *pin]
                kept = {name: value for name, value in plane.environment.items() if "COMPUTESHARE" not in name}
                log = workers.enter_context(open(home / "worker.log", "wb"))
                worker = subprocess.Popen([*command, "--home", str(home)], env=kept, stdout=log, stderr=log)
                workers.callback(worker.wait, 20)
                workers.callback(worker.kill)
            job = plane.create(**{**JOB, "queue": f"far-{name}", "workers": {"min": 3, "max": 3}})
            plane.reach(job, 30)
        for _ in range(2):  # the proxy was away for a moment each time
            with running(proxy, tmp_path, ready):
                plane.reach(job, min(290, plane.job(job)["version"] + 60))
        with running(proxy, tmp_path, ready):
            assert plane.finish(job)["weights_sha256"] == near["weights_sha256"]
    epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    assert len(plane.get(f"/v1/jobs/{job}/workers")["items"]) == 3
