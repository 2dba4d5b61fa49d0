"""Pipeline: the same weights for any workers, with or without deaths, every sample once, a replay that matches."""

import os
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from computeshare import ComputeShare
from computeshare.client import Client
from computeshare.replay.replay import RecipeSource, Replay
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "3", "--queue", "e2e")
SPEC: dict[str, Any] = {name: DIGITS_MLP[name] for name in ("dataset", "model", "queue", "micro_batch")}
SPEC |= {"rounds": 120, "accumulate": 4, "micro_batches_per_round": 2, "evaluate_every": 0, "checkpoint_every": 20}
SPEC |= {"codec": {"up": "float32", "down": "float32"}}
LIMIT_BYTES = 2_400_000_000
has_ulimit = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ulimit -d bounds nothing")
PIPELINE = {"strategy": {"kind": "pipeline", "stages": 2}}
RECIPE = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, images):
        values = self.first(images)
        for layer in self.layers:
            values = values + layer(values.relu())
        return self.last(values)


def model(width=64, depth=4):
    return Net(width, depth)


def data(split, folder):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    some = slice(1437) if split == "train" else slice(1437, None)
    return TensorDataset(images[some], labels[some])
"""


def weights(plane: ControlPlane, job_id: str) -> dict[str, Any]:
    answer = plane.http.get(f"/v1/jobs/{job_id}/checkpoints/latest")
    assert answer.status_code == 200
    return load(answer.content)


def test_one_worker_two_and_two_that_die_make_the_same_weights(plane: ControlPlane) -> None:
    alone = plane.finish(plane.create(**SPEC, **PIPELINE, workers={"min": 1, "max": 1}))
    two = plane.finish(plane.create(**SPEC, **PIPELINE, workers={"min": 2, "max": 2}))
    assert two["weights_sha256"] == alone["weights_sha256"] and two["accuracy"] > 0.9

    dying = plane.create(**SPEC, **PIPELINE, workers={"min": 1, "max": 2})
    for version in (20, 70):
        plane.reach(dying, version)
        kill_last_stage(plane, dying)
    job = plane.finish(dying)
    assert job["weights_sha256"] == alone["weights_sha256"]
    epochs = plane.get(f"/v1/jobs/{dying}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)

    synced = plane.finish(plane.create(**SPEC, workers={"min": 1, "max": 1}))
    expected, found = weights(plane, synced["id"]), weights(plane, two["id"])
    assert all(np.abs(found[name] - values).max() < 1e-5 for name, values in expected.items())


def kill_last_stage(plane: ControlPlane, job_id: str) -> None:
    """Kill the worker that holds a job's last stage."""
    last = plane.get(f"/v1/jobs/{job_id}/workers")["stages"][-1]["worker"]
    pid = next(one["pid"] for one in plane.get("/v1/workers")["items"] if one["id"] == last)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_recipes_model_is_split_and_a_killed_stage_changes_no_bit(plane: ControlPlane, tmp_path: Path) -> None:
    path, token = tmp_path / "net.py", (plane.home / "token").read_text().strip()
    path.write_text(RECIPE)
    fields = {name: value for name, value in SPEC.items() if name not in ("dataset", "model")} | PIPELINE
    session = ComputeShare(plane.url, token)
    alone = plane.finish(session.jobs.create(fields, recipe=str(path), workers={"min": 1, "max": 1}).id)
    assert alone["accuracy"] > 0.75, "of digits by other hands"
    dying = session.jobs.create(fields, recipe=str(path), workers={"min": 1, "max": 2}).id
    plane.until("two workers", lambda: len(plane.get(f"/v1/jobs/{dying}/workers")["stages"]) == 2)
    plane.reach(dying, plane.job(dying)["version"] + 5)
    kill_last_stage(plane, dying)
    job = plane.finish(dying)
    assert job["weights_sha256"] == alone["weights_sha256"]
    assert all(one["counted"] == one["samples"] for one in plane.get(f"/v1/jobs/{dying}/ledger")["epochs"])
    with Client(plane.url, token) as client:
        replay = Replay(client, dying, plane.home / "data", last=10, recipe=RecipeSource(path, tmp_path / "cache"))
        assert [one.version for one in replay.run()] == [*range(1, 11)]
        assert replay.verdict().outcome == "matches"


def test_a_replay_of_a_pipeline_matches_and_a_fork_goes_on(plane: ControlPlane) -> None:
    job = plane.finish(plane.create(**SPEC | {"rounds": 10}, **PIPELINE, workers={"min": 2, "max": 2}))
    with Client(plane.url, (plane.home / "token").read_text().strip()) as client:
        replay = Replay(client, job["id"], plane.home / "data")
        assert [one.version for one in replay.run()] == [*range(1, 11)]
        assert replay.verdict().outcome == "matches"
    request = {"version": 10, "spec": {"rounds": 5}}
    child = plane.finish(plane.http.post(f"/v1/jobs/{job['id']}/fork", json=request).json()["id"])
    assert (child["version"], child["forked_from"]["sha256"]) == (5, job["weights_sha256"])


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        pytest.param("--max-memory", "more than --max-memory allows", id="--max-memory"),
        pytest.param("ulimit", "more than the device has", id="ulimit", marks=has_ulimit),
    ],
)
@pytest.mark.sampled(1)
def test_a_model_that_no_worker_can_hold_trains_on_two(
    plane: ControlPlane, shakespeare_dir: Path, limit: str, why: str
) -> None:
    gpt = {"n_layer": 8, "n_head": 4, "n_embd": 1280, "block_size": 16}  # 157 million parameters
    spec: dict[str, Any] = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": gpt, "queue": "small"}
    spec |= {"micro_batch": 4, "accumulate": 2, "micro_batches_per_round": 1, "rounds": 2, "eval_batch": 256}
    spec |= {"workers": {"min": 1, "max": 2}, "evaluate_every": 0, "checkpoint_every": 0, "optimizer": {"name": "Adam"}}
    flags, limit_bytes = ((limit, str(LIMIT_BYTES)), 0) if limit == "--max-memory" else ((), LIMIT_BYTES)
    shutil.copytree(shakespeare_dir / "tinyshakespeare", plane.home / "data" / "tinyshakespeare", dirs_exist_ok=True)
    with ExitStack() as block:
        for name in ("one", "two"):
            block.enter_context(plane.worker("small", name, *flags, limit_bytes=limit_bytes))
        alone = plane.create(**spec)
        plane.until("the reason", lambda: why in str(plane.job(alone)["reason"]))
        plane.http.post(f"/v1/jobs/{alone}/cancel")
        spread = plane.create(**spec, **PIPELINE)
        plane.reach(spread, spec["rounds"])
    whole_bytes = 4 * 4 * plane.job(spread)["parameters"]
    assert whole_bytes > LIMIT_BYTES, "weights, gradients and Adam's two vectors"
    workers = plane.get(f"/v1/jobs/{spread}/workers")["items"]
    plane.http.post(f"/v1/jobs/{spread}/cancel")  # scoring a model of this size takes long
    assert len(workers) == 2 and all(0 < worker["memory_bytes"] < LIMIT_BYTES for worker in workers)


@pytest.mark.long
def test_a_recipes_model_that_no_worker_can_hold_trains_on_two(plane: ControlPlane, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(RECIPE)
    limit_bytes = 2_300_000_000
    wide = {"recipe": str(path), "recipe_args": {"width": 2560, "depth": 12}}  # 79 million parameters
    fields: dict[str, Any] = {"queue": "small", "micro_batch": 16, "accumulate": 2, "micro_batches_per_round": 1}
    fields |= {"rounds": 2, "workers": {"min": 1, "max": 2}, "evaluate_every": 0, "checkpoint_every": 0}
    fields |= {"codec": SPEC["codec"]}
    session = ComputeShare(plane.url, (plane.home / "token").read_text().strip())
    with ExitStack() as block:
        for name in ("one", "two"):
            block.enter_context(plane.worker("small", name, "--recipes", "--max-memory", str(limit_bytes)))
        alone = session.jobs.create(fields, **wide).id
        plane.until("the reason", lambda: "more than --max-memory allows" in str(plane.job(alone)["reason"]))
        plane.http.post(f"/v1/jobs/{alone}/cancel")
        spread = session.jobs.create(fields | PIPELINE, **wide).id
        plane.reach(spread, fields["rounds"])
    workers = plane.get(f"/v1/jobs/{spread}/workers")["items"]
    plane.http.post(f"/v1/jobs/{spread}/cancel")
    assert len(workers) == 2 and all(0 < worker["memory_bytes"] < limit_bytes for worker in workers)
