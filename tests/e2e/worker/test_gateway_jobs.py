"""Jobs of every kind, whose only worker joined through the gateway: it needs no command that the gateway refuses."""

import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from computeshare.up.embedded_broker import free_port
from tests.e2e.jobs.test_own_data import run
from tests.e2e.worker.test_gateway import invited
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.own_images import make_images

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--port", str(PORT), "--public-url", f"http://127.0.0.1:{PORT}")
LOCAL = {"kind": "local", "inner_steps": 4, "replicas": 1, "inner_state": "kept"}
EXACT = {"up": "float32", "down": "float32"}
JOBS = {
    "measured": {"codec": "auto", "rounds": 5},
    "differences": {"codec": {"up": "topk", "down": "int8"}, "rounds": 30},
    "inner states": {"strategy": LOCAL, "optimizer": None, "rounds": 20},
    "files and a model of several buckets": {"dataset": "tones", "model": "resnet18", "rounds": 2, "micro_batch": 8},
}


def test_a_worker_behind_the_gateway_serves_jobs_of_every_kind(plane: ControlPlane, tmp_path: Path) -> None:
    run(
        plane,
        "data",
        "add",
        "tones",
        str(make_images(tmp_path / "tones", ["dark", "light"], 40, (40, 40))),
        "--size",
        "32",
    )
    with invited(plane, "far", int(urlsplit(plane.url).port or 0), tmp_path / "far") as worker:
        for name, fields in JOBS.items():
            assert plane.finish(_create(plane, name=name, **fields))["status"] == "completed", name
        spread = _create(plane, strategy={"kind": "pipeline", "stages": 2}, codec=EXACT)
        plane.until("the reason", lambda: "hold no stages of a model. Start" in str(plane.job(spread)["reason"]))
        assert plane.http.post(f"/v1/jobs/{spread}/cancel").status_code == 202
        paused = _create(plane, strategy=LOCAL, optimizer=None, rounds=1000)
        plane.reach(paused, 5)
        assert plane.http.post(f"/v1/jobs/{paused}/pause").status_code == 202
        plane.until("it has left", lambda: plane.job(paused)["workers"] == 0)
        assert plane.http.post(f"/v1/jobs/{paused}/resume").status_code == 202
        plane.reach(paused, plane.job(paused)["version"] + 5)
        for seat in psutil.Process(worker.pid).children():
            os.kill(seat.pid, signal.SIGKILL)
        plane.reach(paused, plane.job(paused)["version"] + 5)
        assert plane.http.post(f"/v1/jobs/{paused}/cancel").status_code == 202
        plane.until("it has left again", lambda: plane.job(paused)["workers"] == 0)
        assert plane.http.delete(f"/v1/jobs/{paused}").status_code == 204
    logs = "".join(path.read_text() for path in (plane.home / "logs").glob("*.log"))
    assert [line for line in logs.splitlines() if "refused what a machine sent" in line] == []
    assert "REFUSED" not in (tmp_path / "far" / "worker.log").read_text()


def _create(plane: ControlPlane, **fields: object) -> str:
    spec = {**DIGITS_MLP, "queue": "far", "checkpoint_every": 0, "evaluate_every": 0, **fields}
    return plane.create(**{name: value for name, value in spec.items() if value is not None})
