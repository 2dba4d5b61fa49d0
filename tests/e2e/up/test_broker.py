"""The embedded broker, killed under a real control plane: it is there again at once, and no job notices for long."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from computeshare.protocol.round_store import RoundStore
from computeshare.settings import RunFile
from computeshare.transport.connections import connect
from tests.support.control_plane import DIGITS_MLP, ControlPlane, control_plane
from tests.support.runaway_script import busy_broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "1", "--queue", "e2e")
SPEC: dict[str, Any] = {
    **DIGITS_MLP,
    "checkpoint_every": 100,
    "evaluate_every": 0,
    "keep": {"every": 100},
    "rounds": 600,
}
BUSY_S = 20.0
"""Longer than a worker that nobody hears of is taken to be alive, and than the expiry of each claim and lease."""
GOES_ON_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def calm(plane: ControlPlane) -> dict[str, Any]:
    return plane.finish(plane.create(**SPEC))


def run_file(plane: ControlPlane) -> RunFile:
    run = RunFile.read(plane.home / "run.json")
    assert run is not None
    return run


def kill_broker(plane: ControlPlane) -> float:
    """SIGKILL; returns how long it took until another was there, in seconds."""
    (pid,) = plane.pids("broker")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    plane.until("another broker", lambda: plane.pids("broker") not in ([pid], []), 10)
    return time.monotonic() - killed


def version_of(redis: Redis, job_id: str) -> int:
    """As the round has it."""
    state = RoundStore(redis, job_id).read()
    assert state is not None
    return state.version


def check(plane: ControlPlane, job_id: str, calm: dict[str, Any]) -> None:
    job = plane.finish(job_id)
    assert job["weights_sha256"] == calm["weights_sha256"]
    ledger = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["missing"]) for e in ledger] == [(e["samples"], 0) for e in ledger]


def test_a_broker_killed_in_mid_job_costs_neither_a_bit_nor_a_sample(plane: ControlPlane, calm: dict[str, Any]) -> None:
    job_id = plane.create(**SPEC)
    plane.until("a checkpoint", lambda: plane.job(job_id)["durable_version"] >= 100)
    before, workers = run_file(plane), plane.pids("worker")
    assert kill_broker(plane) < 2
    assert run_file(plane).redis_url == before.redis_url and plane.process.poll() is None
    lost = plane.job(job_id)["version"]
    plane.until("the restored job", lambda: "Continued from version" in plane.http.get(f"/jobs/{job_id}").text, 30)
    plane.reach(job_id, lost + 1)
    check(plane, job_id, calm)
    assert plane.pids("worker") == workers
    tokens = plane.get(f"/v1/jobs/{job_id}/checkpoints")["items"]
    assert {*range(100, 601, 100)} <= {c["version"] for c in tokens}


def test_a_worker_started_by_hand_outlives_a_broker_that_dies_again_and_again(
    plane: ControlPlane, calm: dict[str, Any]
) -> None:
    job_id = plane.create(**{**SPEC, "queue": "hand"})
    with plane.worker("hand", "hand") as worker:
        plane.reach(job_id, 50)
        for _ in range(3):
            kill_broker(plane)
        check(plane, job_id, calm)
        assert worker.poll() is None


def test_a_worker_started_by_hand_outlives_up_and_finds_the_broker_of_the_next(tmp_path: Path) -> None:
    spec = {**SPEC, "queue": "hand", "rounds": 20}
    with control_plane(tmp_path) as plane:
        before = run_file(plane).redis_url
        context = plane.worker("hand", "hand")
        worker = context.__enter__()
        plane.finish(plane.create(**spec))
    try:
        with control_plane(tmp_path) as again:
            assert run_file(again).redis_url == before
            again.finish(again.create(**spec))
            assert worker.poll() is None
    finally:
        context.__exit__(None, None, None)


def test_up_and_api_killed_together_leave_no_broker(tmp_path: Path) -> None:
    with control_plane(tmp_path) as plane:
        brokers = [psutil.Process(pid) for pid in plane.pids("broker")]
        os.kill(plane.process.pid, signal.SIGKILL)
        os.kill(plane.pids("api")[0], signal.SIGKILL)
        plane.process.wait()
        assert psutil.wait_procs(brokers, timeout=8)[1] == [] and len(brokers) == 1


def test_a_job_goes_on_as_soon_as_a_broker_that_a_script_kept_busy_is_free(
    plane: ControlPlane, calm: dict[str, Any]
) -> None:
    job_id = plane.create(**{**SPEC, "rounds": 100_000})
    plane.reach(job_id, 100)
    workers = plane.pids("worker")
    with busy_broker(run_file(plane).redis_url):
        time.sleep(BUSY_S)
    freed = time.monotonic()
    with closing(connect(run_file(plane).redis_url)) as redis:  # over REST, versions from before come only now
        first = version_of(redis, job_id)
        plane.until("new versions", lambda: version_of(redis, job_id) >= first + 5)
    assert time.monotonic() - freed < GOES_ON_WITHIN_S
    assert plane.pids("worker") == workers
    plane.reach(job_id, 600)
    assert plane.http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    (found,) = plane.get(f"/v1/jobs/{job_id}/versions", since=599, limit=1)["items"]
    assert found["sha256"] == calm["weights_sha256"]
