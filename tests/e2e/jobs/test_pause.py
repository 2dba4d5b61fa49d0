"""Pausing real jobs: their workers leave and serve others, and the result is the one of a job left alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane, control_plane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
DIGITS: dict[str, Any] = {
    **DIGITS_MLP,
    "rounds": 600,
    "checkpoint_every": 50,
    "evaluate_every": 0,
}

RESTING = ("status", "reason", "version", "weights_sha256", "loss", "accepted", "stale", "workers", "started_at")
"""What does not change while a job is paused. (Its checkpoints may still be scored.)"""


def change(plane: ControlPlane, job_id: str, verb: str) -> dict[str, Any]:
    response = plane.http.post(f"/v1/jobs/{job_id}/{verb}")
    assert response.status_code == 202, response.text
    return dict(response.json())


def paused_in_mid_run(plane: ControlPlane, **spec: Any) -> str:
    """A job that has a checkpoint, is paused, and whose workers have left."""
    job_id = plane.create(**DIGITS, **spec)
    plane.until("a checkpoint", lambda: plane.job(job_id)["durable_version"] >= 50)
    assert change(plane, job_id, "pause")["status"] == "paused"
    plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0)
    plane.until("no seat", lambda: job_id not in [worker["job_id"] for worker in plane.get("/v1/workers")["items"]])
    return job_id


def timeline(plane: ControlPlane, job_id: str) -> list[dict[str, Any]]:
    """Everything that happened in a job that has ended."""
    with plane.http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [event for event in map(json.loads, lines) if "data" in event]


def check(plane: ControlPlane, job_id: str, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """A resumed job ends with the bits of one left alone and every sample counted once; returns its timeline."""
    assert change(plane, job_id, "resume")["status"] == "queued"
    assert plane.finish(job_id)["weights_sha256"] == alone["weights_sha256"]
    ledger = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [epoch["counted"] for epoch in ledger] == [epoch["samples"] for epoch in ledger]
    return timeline(plane, job_id)


def leave_its_workers_to_another(plane: ControlPlane) -> dict[str, Any]:
    """A job is paused, another trains meanwhile, the first is resumed; returns the other, which was left alone."""
    job_id = paused_in_mid_run(plane, workers={"min": 2, "max": 2})  # no round before both have joined
    workers = plane.get(f"/v1/jobs/{job_id}/workers")["items"]
    assert [worker["left_reason"] for worker in workers] == ["the job is paused"] * 2  # nobody was killed
    other = plane.create(**DIGITS)
    plane.reach(other, 10)
    held = plane.job(job_id)
    assert 50 <= held["version"] < 600 and held["reason"] == "Paused by the owner"
    alone = plane.finish(other)
    now = plane.job(job_id)
    assert {name: now[name] for name in RESTING} == {name: held[name] for name in RESTING}
    events = [event["type"] for event in check(plane, job_id, alone)]
    assert [kind for kind in events if kind in ("opened", "paused", "resumed")] == ["opened", "paused", "resumed"]
    assert plane.job(job_id)["started_at"] == held["started_at"]
    return alone


@pytest.mark.timeout(600)
def test_a_paused_job_leaves_its_workers_to_others_outlives_up_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    with control_plane(tmp_path, "--workers", "2", "--queue", "e2e") as plane:
        alone = leave_its_workers_to_another(plane)
        job_id = paused_in_mid_run(plane)
    with control_plane(tmp_path, "--workers", "1", "--queue", "e2e") as again:
        again.finish(again.create(**{**DIGITS, "rounds": 10}))  # whoever is free would have served the older job first
        held = again.job(job_id)
        assert (held["status"], held["reason"]) == ("paused", "Paused by the owner")
        assert 50 <= held["version"] < 600
        events = check(again, job_id, alone)
        assert [event["data"]["restored"] for event in events if event["type"] == "opened"] == [False, True]


def test_a_pause_in_the_middle_of_a_lease_is_no_failure(tmp_path: Path) -> None:
    """What is being computed is given up, and the worker leaves as politely as between two leases."""
    with control_plane(tmp_path, "--workers", "1", "--queue", "e2e") as plane:
        spec = {"dataset": "digits", "model": "resnet18", "input": [3, 32, 32], "queue": "e2e", "rounds": 20}
        job_id = plane.create(**spec, micro_batch=64, micro_batches_per_round=16)  # seconds for each lease
        plane.reach(job_id, 1)
        change(plane, job_id, "pause")
        plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0)
        (worker,) = plane.get(f"/v1/jobs/{job_id}/workers")["items"]
        assert worker["left_reason"] == "the job is paused"
        change(plane, job_id, "resume")
        plane.reach(job_id, plane.job(job_id)["version"] + 1)
