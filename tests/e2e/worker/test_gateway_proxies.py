"""Behind nginx with real TLS, which is stopped and started in mid-job, three workers train to the same bits."""

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
if not (shutil.which("nginx") and shutil.which("openssl")):
    lacking("no nginx, or no openssl")


def test_three_workers_behind_nginx_end_with_the_bits_of_one_beside_the_broker(
    plane: ControlPlane, tmp_path: Path
) -> None:
    certify(tmp_path)
    target = urlsplit(plane.url).port
    (tmp_path / "nginx.conf").write_text(NGINX.format(folder=tmp_path, host="127.0.0.1", port=PORT, target=target))
    nginx = [str(shutil.which("nginx")), "-e", str(tmp_path / "nginx.log"), "-c", str(tmp_path / "nginx.conf")]
    certificate = ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())

    def ready() -> None:
        ssl.get_server_certificate(("localhost", PORT))

    with plane.worker("near"):
        near = plane.finish(plane.create(**{**JOB, "queue": "near"}))
    with ExitStack() as workers:
        with running(nginx, tmp_path, ready):
            for number in range(3):
                made = plane.http.post("/v1/invites", json={"queue": "far"}).json()
                link = made["command"].split()[-1]
                home = tmp_path / f"far-{number}"
                home.mkdir()
                pin = ["--tls-fingerprint", hashlib.sha256(certificate).hexdigest()]
                command = [
                    sys.executable,
                    "-m",
                    "computeshare.worker.process",
                    "--join",
                    link,
                    "--home",
                    str(home),
                    *pin,
                ]
                kept = {name: value for name, value in plane.environment.items() if "COMPUTESHARE" not in name}
                log = workers.enter_context(open(home / "worker.log", "wb"))
                worker = subprocess.Popen([*command, "--home", str(home)], env=kept, stdout=log, stderr=log)
                workers.callback(worker.wait, 20)
                workers.callback(worker.kill)
            job = plane.create(**{**JOB, "queue": "far", "workers": {"min": 3, "max": 3}})
            plane.reach(job, 30)
        for _ in range(2):  # nginx was away for a moment each time
            with running(nginx, tmp_path, ready):
                plane.reach(job, min(290, plane.job(job)["version"] + 60))
        with running(nginx, tmp_path, ready):
            assert plane.finish(job)["weights_sha256"] == near["weights_sha256"]
    epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    assert len(plane.get(f"/v1/jobs/{job}/workers")["items"]) == 3
