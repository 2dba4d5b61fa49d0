"""Gossip: peers average in pairs, agree, survive each other's death, and every sample counts."""

import os
import signal
from typing import Any

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "3", "--queue", "e2e")
SPEC: dict[str, Any] = {name: DIGITS_MLP[name] for name in ("dataset", "model", "queue", "micro_batch")}
SPEC |= {"epochs": 12, "workers": {"min": 3, "max": 3}, "evaluate_every": 0, "checkpoint_every": 5}


def strategy(**changes: Any) -> dict[str, Any]:
    return {"strategy": {"kind": "gossip", "every": 2, "buffer": 8, **changes}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"interpolation": "clock"}, {"interpolation": "loss"}, {"matching": "pairs", "outer_momentum": 0.5}],
    ids=str,
)
def test_peers_learn_and_agree(plane: ControlPlane, changes: dict[str, Any]) -> None:
    job = plane.finish(plane.create(**SPEC, **strategy(**changes)))
    assert job["accuracy"] > 0.9
    epochs = plane.get(f"/v1/jobs/{job['id']}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    found = plane.get(f"/v1/jobs/{job['id']}/workers")
    assert len(found["items"]) == 3 and all(worker["accepted"] > 5 for worker in found["items"])
    ids = {worker["id"] for worker in found["items"]}
    met = {(one["worker"], one["peer"]): one["count"] for one in found["exchanges"]}
    assert all({*pair} <= ids and pair[0] != pair[1] for pair in met) and len(met) >= 4
    assert sum(met.values()) > 20


def consensus(plane: ControlPlane, **changes: Any) -> list[float]:
    """How far the peers of a job are apart, by version."""
    job = plane.finish(plane.create(**SPEC, **strategy(**changes)))
    return [point["value"] for point in plane.get(f"/v1/jobs/{job['id']}/metrics")["consensus"]]


def test_peers_that_do_not_exchange_drift_apart(plane: ControlPlane) -> None:
    together, apart = consensus(plane), consensus(plane, fetch_probability=0)
    assert len(together) > 20 and len(apart) > 20
    assert sum(apart[-5:]) > 2 * sum(together[-5:])


def test_a_peer_that_dies_costs_its_unpublished_steps_alone_and_another_takes_its_place(plane: ControlPlane) -> None:
    job_id = plane.create(**SPEC | {"epochs": 40}, **strategy(), codec={"up": "int8", "down": "float32"})
    plane.until("three workers", lambda: plane.job(job_id)["workers"] == 3)
    plane.reach(job_id, plane.job(job_id)["version"] + 10)
    os.kill(plane.pids("worker")[0], signal.SIGKILL)
    job = plane.finish(job_id)
    assert job["accuracy"] > 0.9
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
