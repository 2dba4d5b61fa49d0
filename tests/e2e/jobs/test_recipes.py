"""A user's recipe, from the file to the same weights whoever takes part."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from computeshare import ComputeShare
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "3", "--queue", "e2e")
DIGITS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def model(width=64, fails=False):
    hidden = nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)
    layers = nn.Sequential(*hidden, nn.Linear(width, 10))
    if fails:
        layers.register_forward_pre_hook(break_off)
    return layers


def break_off(module, inputs):
    if len(inputs[0]) > 8:  # not in the trial
        raise ValueError("the recipe's own words")


def data(split, folder):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    some = slice(1437) if split == "train" else slice(1437, None)
    return TensorDataset(images[some], labels[some])
"""
LINE = 1 + next(number for number, line in enumerate(DIGITS.splitlines()) if "own words" in line)
FIELDS: dict[str, Any] = {
    "queue": "e2e",
    "rounds": 150,
    "micro_batch": 16,
    "threads": 1,
    "checkpoint_every": 0,
    "evaluate_every": 0,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "digits.py"
    path.write_text(DIGITS)
    return path


@pytest.fixture
def session(plane: ControlPlane) -> ComputeShare:
    return ComputeShare(plane.url, (plane.home / "token").read_text().strip())


def test_one_worker_and_three_of_whom_one_is_killed_end_with_the_same_bits(
    plane: ControlPlane, session: ComputeShare, recipe: Path
) -> None:
    alone = session.jobs.create(FIELDS, recipe=str(recipe), recipe_args={"width": 48}, workers={"min": 1, "max": 1})
    expected = plane.finish(alone.id)
    assert expected["accuracy"] > 0.85, "of digits by other hands"
    three = session.jobs.create(FIELDS, recipe=str(recipe), recipe_args={"width": 48}, workers={"min": 3, "max": 3}).id
    plane.until("three workers", lambda: plane.job(three)["workers"] == 3)
    plane.reach(three, plane.job(three)["version"] + 10)
    os.kill(plane.pids("worker")[0], signal.SIGKILL)
    assert plane.job(three)["status"] == "running"
    assert plane.finish(three)["weights_sha256"] == expected["weights_sha256"]


def test_peers_average_a_recipes_model_with_batch_normalisation_in_pairs(
    plane: ControlPlane, session: ComputeShare, recipe: Path
) -> None:
    gossip = {"strategy": {"kind": "gossip", "every": 2, "buffer": 8}, "rounds": 40}
    job = session.jobs.create(FIELDS | gossip, recipe=str(recipe), workers={"min": 3, "max": 3})
    assert plane.finish(job.id)["accuracy"] > 0.8, "with running statistics that are averaged, too"
    found = plane.get(f"/v1/jobs/{job.id}/workers")
    assert sum(one["count"] for one in found["exchanges"]) > 20
    assert all(worker["accepted"] > 5 for worker in found["items"])


def test_a_recipe_that_fails_everywhere_ends_its_job_with_its_own_line(
    plane: ControlPlane, session: ComputeShare, recipe: Path
) -> None:
    job = session.jobs.create(FIELDS, recipe=str(recipe), recipe_args={"fails": True}).id
    plane.until("the job's end", lambda: plane.job(job)["status"] == "failed")
    told = f"recipe.py, line {LINE}: training failed: ValueError: the recipe's own words"
    assert str(plane.job(job)["error"]).startswith("The recipe failed on every machine that tried it (")
    assert f": {told}. Mend it" in plane.job(job)["error"]


def test_a_worker_whose_owner_has_not_agreed_gets_no_seat(
    plane: ControlPlane, session: ComputeShare, recipe: Path
) -> None:
    with plane.worker("others"):
        job = session.jobs.create(FIELDS | {"queue": "others"}, recipe=str(recipe))
        digest = job.document["spec"]["recipe"]
        plane.until("the reason", lambda: f"--recipe {digest}" in str(plane.job(job.id)["reason"]))
        assert plane.job(job.id)["workers"] == 0
        job.cancel()
