"""A machine that reaches the control plane over one HTTP/1.1 proxy alone trains to the same bits as one beside the
broker, whatever is cut on the way.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest

from computeshare.up.embedded_broker import free_port
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.reverse_proxy import ReverseProxy

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--port", str(PORT), "--public-url", f"http://127.0.0.1:{PORT}")
JOB = {**DIGITS_MLP, "rounds": 300, "checkpoint_every": 0, "evaluate_every": 0}
CUT_S = 2.0
"""Within which a machine whose invite was withdrawn is cut."""


@contextmanager
def invited(plane: ControlPlane, queue: str, port: int, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that was invited to a queue and knows nothing but a link to this port; with its output in `home`."""
    answer = plane.http.post("/v1/invites", json={"queue": queue}).json()
    link = f"http://127.0.0.1:{port}#{answer['url'].rpartition('/')[2]}"
    kept = {name: value for name, value in plane.environment.items() if not name.startswith("COMPUTESHARE_")}
    home.mkdir()
    command = [
        sys.executable,
        "-m",
        "computeshare.worker.process",
        "--join",
        link,
        "--home",
        str(home),
        "--name",
        queue,
    ]
    with open(home / "worker.log", "wb") as file:
        process = subprocess.Popen(command, env=kept, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def test_through_the_gateway_a_job_ends_with_the_same_bits_though_proxy_and_gateway_are_killed(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with plane.worker("near"):
        near = plane.finish(plane.create(**{**JOB, "queue": "near"}))
    port = int(urlsplit(plane.url).port or 0)
    with ReverseProxy(("127.0.0.1", port)) as proxy, invited(plane, "far", proxy.port, tmp_path / "far"):
        whole = plane.finish(plane.create(**{**JOB, "queue": "far"}))
        assert whole["weights_sha256"] == near["weights_sha256"]

        cut = plane.create(**{**JOB, "queue": "far"})
        plane.reach(cut, 30)
        proxy.cut_all()
        plane.reach(cut, plane.job(cut)["version"] + 10)
        [api] = plane.pids("api")
        os.kill(api, signal.SIGKILL)
        plane.until("another gateway", lambda: plane.pids("api") not in ([api], []))
        plane.until("its answer", lambda: _answers(plane))
        assert plane.finish(cut)["weights_sha256"] == near["weights_sha256"]
        assert proxy.upgrades > 10
    for job in (whole["id"], cut):
        epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
        assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    [shown] = [one for one in plane.get("/v1/invites")["items"] if one["worker"] == "far"]
    logs = "".join(path.read_text() for path in (plane.home / "logs").glob("*.log"))
    assert "refused what a machine sent" not in logs and "calls scripts too fast" not in logs
    assert shown["status"] == "joined" and shown["bytes_up"] > 100_000 and shown["bytes_down"] > 100_000


def test_a_worker_whose_invite_is_withdrawn_in_mid_job_is_cut_and_others_go_on_exactly(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with plane.worker("alone"):
        alone = plane.finish(plane.create(**{**JOB, "queue": "alone"}))
    port = int(urlsplit(plane.url).port or 0)
    with invited(plane, "shared", port, tmp_path / "banned") as banned:
        job = plane.create(**{**JOB, "queue": "shared"})
        plane.reach(job, 20)
        [machine] = [one["id"] for one in plane.get("/v1/invites")["items"] if one["worker"] == "shared"]
        assert _connections(banned.pid, port)
        assert plane.http.delete(f"/v1/invites/{machine}").status_code == 204
        answered_s = time.time()
        plane.until("it is cut", lambda: not _connections(banned.pid, port), patience_s=CUT_S)
        assert banned.wait(15) == 6
    log = (tmp_path / "banned" / "worker.log").read_text()
    assert "may not use the gateway any more" in log and "redis://" not in log
    with plane.worker("shared"):
        assert plane.finish(job)["weights_sha256"] == alone["weights_sha256"]
    [its] = [one["id"] for one in plane.get(f"/v1/jobs/{job}/workers")["items"] if one["id"].startswith(machine)]
    [last] = plane.get(f"/v1/jobs/{job}/submissions", worker=its, outcome="accepted", limit=1)["items"]
    assert datetime.fromisoformat(last["at"]).timestamp() <= answered_s, "nothing counts that it sent later"
    epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)


def _connections(pid: int, port: int) -> list[object]:
    """The connections of a worker's processes to the control plane's port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        worker = psutil.Process(pid)
        found = [one for each in (worker, *worker.children(recursive=True)) for one in each.net_connections("tcp")]
        return [one for one in found if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port == port]
    return []


def _answers(plane: ControlPlane) -> bool:
    try:
        return bool(plane.http.get("/readyz").status_code == 200)
    except httpx2.HTTPError:
        return False
