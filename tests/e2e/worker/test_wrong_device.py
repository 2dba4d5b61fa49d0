"""Machines that cannot take part in a job, with real processes: they train nothing, and everybody can read why."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.control_plane import ControlPlane

pytestmark = pytest.mark.e2e
WRONG_FROM_THE_SECOND_CALL = """
import sys

if "computeshare.worker.horse" in sys.orig_argv:
    from torch import nn

    right, calls = nn.Conv2d.forward, {}

    def forward(self, images):
        found = right(self, images)
        calls[self] = calls.get(self, 0) + 1
        return found + 0.01 * (found - found.detach()) if calls[self] > 1 else found  # right values, wrong gradients

    nn.Conv2d.forward = forward
"""
LENET: dict[str, object] = {
    "dataset": "digits",
    "model": "lenet5",
    "input": [1, 28, 28],
    "queue": "tested",
    "rounds": 20,
}


@contextmanager
def broken_worker(plane: ControlPlane, folder: Path) -> Iterator[Path]:
    """A worker whose seats get gradients of convolutions that are off by a percent; its log."""
    (folder / "sitecustomize.py").write_text(WRONG_FROM_THE_SECOND_CALL)
    command = [sys.executable, "-m", "computeshare.worker.process", "--queue", "tested", "--name", "broken"]
    log = folder / "broken.log"
    environment = {**plane.environment, "PYTHONPATH": str(folder)}
    with open(log, "ab") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        yield log
        process.terminate()


def test_a_worker_whose_device_is_wrong_trains_nothing_and_says_why(plane: ControlPlane, tmp_path: Path) -> None:
    job_id = plane.create(**LENET)
    with broken_worker(plane, tmp_path) as log:
        reason = plane.until("the reason", lambda: "cannot take part" in (r := plane.job(job_id)["reason"] or "") and r)
        assert "broken cannot take part: its cpu" in reason and "computes lenet5 wrongly: gradient 2" in reason
        (worker,) = plane.get("/v1/workers")["items"]
        assert [why.startswith(f"Job {job_id}: broken cannot take part") for why in worker["left_out"]] == [True]
        assert "this machine cannot take part in the job" in log.read_text()
        with plane.worker("tested", "right"):
            job = plane.finish(job_id)
        told = plane.get(f"/v1/jobs/{job_id}/logs", level="error")["items"]
        assert ["this machine cannot take part in the job" in line["text"] for line in told] == [True]
        parts = {one["name"]: one["accepted"] for one in plane.get(f"/v1/jobs/{job_id}/workers")["items"]}
        assert parts == {"broken": 0, "right": job["accepted"]} and job["accepted"] >= 20
        with_mlp = plane.create(**{**LENET, "model": "mlp"})  # has no convolution: the same machine may train it
        plane.until("a part in the other job", lambda: plane.job(with_mlp)["accepted"])


def test_a_job_that_takes_more_than_the_owner_allows_trains_elsewhere(plane: ControlPlane, tmp_path: Path) -> None:
    job_id = plane.create(**{**LENET, "queue": "small"})
    with small_worker(plane, tmp_path, "505MB"):  # enough for what is known of the model, not for what torch takes
        reason = plane.until("the reason", lambda: "cannot take part" in (r := plane.job(job_id)["reason"] or "") and r)
        assert "small cannot take part: the job needs about" in reason
        assert (
            "more than --max-memory allows (505 MB): raise --max-memory or accumulate, or lower micro_batch" in reason
        )
        with plane.worker("small", "large"):
            job = plane.finish(job_id)
    parts = {one["name"]: one for one in plane.get(f"/v1/jobs/{job_id}/workers")["items"]}
    assert parts["small"]["accepted"] == 0 and parts["large"]["accepted"] == job["accepted"]
    assert 500_000_000 < parts["large"]["memory_bytes"] < 2_000_000_000


@contextmanager
def small_worker(plane: ControlPlane, folder: Path, size: str) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "computeshare.worker.process",
        "--queue",
        "small",
        "--name",
        "small",
        "--max-memory",
        size,
    ]
    with (
        open(folder / "small.log", "ab") as file,
        subprocess.Popen(command, env=plane.environment, stdout=file, stderr=file) as process,
    ):
        yield
        process.terminate()
