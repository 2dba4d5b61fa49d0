"""A job that stops early ends with the same weights, however far training was when its scores were known."""

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "2", "--queue", "e2e")


def test_a_job_that_stops_early_is_complete_and_ends_where_another_with_one_worker_does(plane: ControlPlane) -> None:
    stop = {"stop": {"metric": "accuracy", "at": 0.8}, "validation": 0.1, "rounds": 20_000}
    job = {**DIGITS_MLP, **stop, "checkpoint_every": 0, "evaluate_every": 5}
    both, alone = (plane.finish(plane.create(**job, workers={"max": count})) for count in (2, 1))
    assert (both["status"], both["version"]) == ("completed", both["rounds_total"])
    assert "Stopped early: accuracy" in both["reason"] and both["version"] % 5 == 0 and both["version"] < 20_000
    assert (both["version"], both["weights_sha256"]) == (alone["version"], alone["weights_sha256"])
    assert both["accuracy"] >= 0.8 and both["tested"]["samples"] == 360
    latest = plane.get(f"/v1/jobs/{both['id']}/checkpoints")["items"][0]
    assert (latest["version"], latest["sha256"]) == (both["version"], both["weights_sha256"])
    epochs = plane.get(f"/v1/jobs/{both['id']}/ledger")["epochs"]
    assert all((epoch["counted"], epoch["missing"]) == (epoch["samples"], 0) for epoch in epochs)
