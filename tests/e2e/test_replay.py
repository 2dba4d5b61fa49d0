"""Jobs recomputed from their logs on this machine: every version matches, and what was changed in the log is found."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, control_plane

pytestmark = pytest.mark.e2e
DIGITS: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "queue": "e2e",
    "micro_batch": 16,
    "micro_batches_per_round": 4,
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    "rounds": 60,
    "checkpoint_every": 20,
    "evaluate_every": 0,
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("home"), "--workers", "2", "--queue", "e2e") as plane:
        yield plane


def replay(plane: ControlPlane, job_id: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """The command as a user runs it: its exit code and its document."""
    command = [sys.executable, "-m", "computeshare.cli", "jobs", "replay", job_id, "--json", *flags]
    done = subprocess.run(command, env=plane.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "spec",
    [
        {"codec": {"up": "float16", "down": "float32"}},
        {"codec": {"up": "float32", "down": "float16"}, "optimizer": {"name": "Adam", "lr": 0.01}},
        {"model": "resnet18", "input": [1, 32, 32], "rounds": 4},
    ],
    ids=["half up", "half down", "batch norm"],
)
def test_every_version_of_a_job_matches(plane: ControlPlane, spec: dict[str, Any]) -> None:
    job = plane.finish(plane.create(**{**DIGITS, **spec}))
    code, found = replay(plane, job["id"])
    assert (code, found["outcome"], found["matched"]) == (0, "matches", job["rounds_total"])
