"""Behind nginx and Caddy with real TLS, stopped and started in mid-job, three workers train to the same bits."""

import hashlib
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psutil
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
FORWARDING = "proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade;"


@pytest.mark.parametrize("name", PROXIES)
def test_three_workers_behind_a_proxy_end_with_the_bits_of_one_beside_the_broker(
    name: str, plane: ControlPlane, tmp_path: Path
) -> None:
    proxy, ready = fronted(name, plane, tmp_path)
    with plane.worker(f"near-{name}"):
        near = plane.finish(plane.create(**{**JOB, "queue": f"near-{name}"}))
    with ExitStack() as workers:
        with running(proxy, tmp_path, ready):
            join(plane, f"far-{name}", tmp_path, workers)
            job = plane.create(**{**JOB, "queue": f"far-{name}", "workers": {"min": 3, "max": 3}})
            plane.reach(job, 30)
        for _ in range(2):  # the proxy was away for a moment each time
            with running(proxy, tmp_path, ready):
                plane.reach(job, min(290, plane.job(job)["version"] + 60))
        with running(proxy, tmp_path, ready):
            assert plane.finish(job)["weights_sha256"] == near["weights_sha256"]
    is_exact(plane, job)


def test_gateways_of_their_own_share_the_machines_and_one_that_is_killed_costs_no_bit(
    plane: ControlPlane, tmp_path: Path
) -> None:
    proxy, ready = fronted("nginx", plane, tmp_path)
    config, ports = tmp_path / "proxy.conf", (free_port(), free_port())
    text = config.read_text()
    own = f"location /v1/gateway {{ proxy_pass http://gateways; {FORWARDING} }}\n    location / {{"
    servers = " ".join(f"server 127.0.0.1:{port} fail_timeout=1s;" for port in ports)
    text = text.replace("location / {", own).replace(
        "  server {", f"  upstream gateways {{ {servers} }}\n  server {{", 1
    )
    config.write_text(text)
    command = [sys.executable, "-m", "api.gateway.process", "--home", str(plane.home), "--port"]
    environment = {name: value for name, value in plane.environment.items() if name.startswith("COMPUTESHARE_")}
    with plane.worker("near"):
        near = plane.finish(plane.create(**{**JOB, "queue": "near"}))

    def gateway(port: int) -> AbstractContextManager[None]:
        return running(
            [*command, str(port)], tmp_path, lambda: httpx2.get(f"http://127.0.0.1:{port}/healthz"), **environment
        )

    with ExitStack() as block:
        block.enter_context(gateway(ports[0]))
        block.enter_context(running(proxy, tmp_path, ready))
        with gateway(ports[1]):
            join(plane, "far", tmp_path, block)
            job = plane.create(**{**JOB, "queue": "far", "workers": {"min": 3, "max": 3}})
            plane.reach(job, 30)
            assert all(connections(port) for port in ports)
        assert plane.finish(job)["weights_sha256"] == near["weights_sha256"]
    is_exact(plane, job)


def fronted(name: str, plane: ControlPlane, folder: Path) -> tuple[list[str], Callable[[], object]]:
    """The command of a proxy before the API, with its configuration and certificate written, and a call that raises
    until it answers.
    """
    if not (shutil.which(name) and shutil.which("openssl")):
        lacking(f"no {name}, or no openssl")
    certify(folder)
    config, words = PROXIES[name]
    target = urlsplit(plane.url).port
    (folder / "proxy.conf").write_text(config.format(folder=folder, host="127.0.0.1", port=PORT, target=target))
    return [word.format(folder=folder) for word in words], lambda: ssl.get_server_certificate(("localhost", PORT))


def join(plane: ControlPlane, queue: str, folder: Path, block: ExitStack) -> None:
    """Three workers that took up an invite each and trust the proxy's certificate alone, until the block ends."""
    certificate = ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())
    pin = ["--tls-fingerprint", hashlib.sha256(certificate).hexdigest()]
    kept = {name: value for name, value in plane.environment.items() if "COMPUTESHARE" not in name}
    for number in range(3):
        link = plane.http.post("/v1/invites", json={"queue": queue}).json()["command"].split()[-1]
        home = folder / f"far-{number}"
        home.mkdir()
        command = [sys.executable, "-m", "computeshare.worker.process", "--join", link, *pin, "--home", str(home)]
        with open(home / "worker.log", "wb") as log:
            worker = subprocess.Popen(command, env=kept, stdout=log, stderr=log)
        block.callback(worker.wait, 20)
        block.callback(worker.kill)


def connections(port: int) -> int:
    """How many connections a server on this port has."""
    found = psutil.net_connections("tcp")
    return sum(one.status == "ESTABLISHED" and bool(one.laddr) and one.laddr.port == port for one in found)


def is_exact(plane: ControlPlane, job: str) -> None:
    """Three workers computed every sample once."""
    epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    assert len(plane.get(f"/v1/jobs/{job}/workers")["items"]) == 3
