"""One worker with several devices counts as one, and the job ends with the bits of one device."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "0", "--queue", "e2e")
SHARED = {"micro_batches_per_round": 4, "checkpoint_every": 0, "evaluate_every": 0, "threads": 1}
BATCH_NORM = {**DIGITS_MLP, **SHARED, "model": "resnet18", "rounds": 24, "micro_batch": 8, "input": [3, 32, 32]}
LOCAL = {
    **{name: DIGITS_MLP[name] for name in ("dataset", "model", "queue", "micro_batch")},
    **{"rounds": 800, "checkpoint_every": 0, "evaluate_every": 0, "threads": 1},
    "strategy": {"kind": "local", "inner_steps": 5, "replicas": 4},
}
JOBS: dict[str, dict[str, Any]] = {"sync": BATCH_NORM, "local": LOCAL}


@pytest.mark.parametrize("name", JOBS)
def test_two_devices_end_with_the_bits_of_one_also_if_the_worker_is_killed(plane: ControlPlane, name: str) -> None:
    spec = {**JOBS[name], "workers": {"min": 1, "max": 1}}
    with plane.worker("e2e", "one", "--device", "cpu"):
        alone = plane.finish(plane.create(**spec, name=f"{name}, one device"))

    with plane.worker("e2e", "both", "--device", "cpu,cpu") as both:
        job = plane.create(**spec, name=f"{name}, two devices")
        plane.until("both devices computed", lambda: len(_units(plane)) == 2 and all(_units(plane)))
        (worker,) = plane.get(f"/v1/jobs/{job}/workers")["items"]
        assert worker["name"] == "both" and worker["device"].startswith("cpu (2 x ")
        assert plane.job(job)["status"] == "running"
        both.kill()
        both.wait()
    with plane.worker("e2e", "again", "--device", "cpu,cpu"):
        assert plane.finish(job)["weights_sha256"] == alone["weights_sha256"]
    for one in (alone["id"], job):
        epochs = plane.get(f"/v1/jobs/{one}/ledger")["epochs"]
        assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)


def _units(plane: ControlPlane) -> list[int]:
    """The units that each device of the running worker has computed, by `computeshare-worker status`."""
    command = [sys.executable, "-m", "computeshare.worker.process", "status", "--json", "--home", str(plane.home)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return next((one["job"]["units"] for one in told["workers"] if one["job"]), [])
