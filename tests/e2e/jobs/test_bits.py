"""A job ends with the same bits whoever takes part and however it is sent: one worker, three, three of whom two die."""

import os
import signal
from typing import Any

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "3", "--queue", "e2e")
ROUNDS = {"rounds": 250, "checkpoint_every": 0, "evaluate_every": 0}
LOCAL = {"rounds": 80} | {name: DIGITS_MLP[name] for name in ("dataset", "model", "queue", "micro_batch")}
WITHOUT_OPTIMIZER = {name: value for name, value in DIGITS_MLP.items() if name != "optimizer"}
JOBS: dict[str, dict[str, Any]] = {
    **{
        codec: {**DIGITS_MLP, "codec": {"up": codec, "down": codec}}
        for codec in ("float32", "float16", "bfloat16", "int8", "int4")
    },
    "low rank down": {**DIGITS_MLP, "codec": {"up": "int8", "down": "lowrank4"}},
    "computed in bfloat16": {**DIGITS_MLP, "precision": "bfloat16"},
    "local": {**LOCAL, "strategy": {"kind": "local", "inner_steps": 5, "replicas": 4}},
    "sync, delay": {**DIGITS_MLP, "strategy": {"kind": "sync", "delay": 1}},
    "local, delay, int8": {
        **LOCAL,
        "strategy": {"kind": "local", "inner_steps": 5, "replicas": 4, "delay": 1},
        "codec": {"up": "int8", "down": "int8"},
    },
    "local, delay, int4": {
        **LOCAL,
        "strategy": {"kind": "local", "inner_steps": 5, "replicas": 4, "delay": 1},
        "codec": {"up": "int4", "down": "int4"},
    },
    "signsgd": {**WITHOUT_OPTIMIZER, "strategy": {"kind": "signsgd", "lr": 0.002}},
    "local, int8": {
        **LOCAL,
        "strategy": {"kind": "local", "inner_steps": 5, "replicas": 4},
        "codec": {"up": "int8", "down": "int8"},
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", JOBS)
def test_one_worker_three_and_three_of_whom_two_die_end_with_the_same_bits(plane: ControlPlane, name: str) -> None:
    spec = {**ROUNDS, **JOBS[name]}
    alone = plane.finish(plane.create(**spec, workers={"min": 1, "max": 1}, name=f"{name}, alone"))

    together = plane.create(**spec, workers={"min": 3, "max": 3}, name=f"{name}, three")
    assert plane.finish(together)["weights_sha256"] == alone["weights_sha256"]
    workers = plane.get(f"/v1/jobs/{together}/workers")["items"]
    assert len(workers) == 3 and all(worker["accepted"] > 10 for worker in workers)

    fewer = plane.create(**spec, workers={"min": 1, "max": 3}, name=f"{name}, two of three killed")
    plane.until("three workers", lambda: plane.job(fewer)["workers"] == 3)
    plane.reach(fewer, plane.job(fewer)["version"] + 20)
    for pid in plane.pids("worker")[:2]:
        os.kill(pid, signal.SIGKILL)
    assert plane.job(fewer)["status"] == "running"
    assert plane.finish(fewer)["weights_sha256"] == alone["weights_sha256"]
    for job in (alone["id"], together, fewer):
        epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
        assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs[:-1])
