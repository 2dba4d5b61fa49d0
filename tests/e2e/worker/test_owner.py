"""The owner of a machine sees what its workers do, and stops them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "1", "--queue", "local")
LONG = {**DIGITS_MLP, "rounds": 100_000, "evaluate_every": 0, "checkpoint_every": 0}


def owner(home: Path, *words: str) -> str:
    """What a command of the owner prints; it must succeed."""
    command = [sys.executable, "-m", "computeshare.worker.process", *words, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen(home: Path) -> dict[str, dict[str, Any]]:
    """The workers of a home, by name."""
    return {one["name"]: one for one in json.loads(owner(home, "status", "--json"))["workers"]}


def test_the_owner_sees_the_job_the_limits_and_the_bytes_and_stops_the_worker(
    plane: ControlPlane, tmp_path: Path
) -> None:
    assert "No worker runs here" in owner(tmp_path, "status")
    flags = ("--max-up", "80mbit", "--hours", "00-24", "--only-on-power")
    with plane.worker("owned", "mac", *flags, home=tmp_path) as worker, plane.worker("idle", "two", home=tmp_path):
        job_id = plane.create(**{**LONG, "queue": "owned", "name": "birds"})
        plane.reach(job_id, 20)
        plane.until("the second worker", lambda: seen(tmp_path).get("two", {}).get("state") == "idle")
        one = plane.until("its job", lambda: (w := seen(tmp_path)["mac"])["job"] and w["moved"]["bytes_up"] and w)
        assert (one["pid"], one["state"], one["queues"]) == (worker.pid, "busy", ["owned"])
        assert (one["job"]["id"], one["job"]["name"], one["job"]["recipe"]) == (job_id, "birds", "")
        assert one["limits"]["max_up"] == "80mbit" and one["limits"]["only_on_power"] and one["control_plane"]
        told = owner(tmp_path, "status")
        assert f"trains birds (job {job_id}, created by the owner), version" in told
        assert "upload 80mbit" in told and "waits for a job" in told
        assert owner(tmp_path, "stop", "mac") == "stopped mac\n"
        assert worker.wait(5) == 6  # as if the control plane's owner had removed it: no supervisor starts it again
        assert list(seen(tmp_path)) == ["two"]
        gone = plane.until("its leave", lambda: plane.get(f"/v1/jobs/{job_id}/workers")["items"][0]["left_at"])
        assert gone
        assert json.loads(owner(tmp_path, "status", "--json"))["total"]["bytes_up"] > 0
    plane.http.post(f"/v1/jobs/{job_id}/cancel")


def test_a_local_worker_that_its_owner_stops_is_not_started_again(plane: ControlPlane) -> None:
    (local,) = plane.until("the local worker", lambda: list(seen(plane.home).values()))
    assert owner(plane.home, "stop", "--now", str(local["pid"])) == f"stopped {local['name']}\n"
    plane.until("up's note", lambda: plane.pids("worker") == [])
    assert seen(plane.home) == {}
