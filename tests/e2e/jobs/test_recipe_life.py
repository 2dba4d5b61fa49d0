"""A recipe's job from its creation to its removal, by the commands that a user types."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "3", "--queue", "e2e")
DIGITS = """
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Late(nn.Linear):
    until = 0.0

    def forward(self, inputs):
        if len(inputs) > 8 and time.time() < self.until:  # not in the trial
            raise ValueError("too early")
        return super().forward(inputs)


def model(width=16, until=0.0):
    first = Late(64, width)
    first.until = until
    return nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))


def data(split, folder):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    some = slice(1437) if split == "train" else slice(1437, None)
    return TensorDataset(images[some], labels[some])


def predict(model, file):
    values = torch.tensor([float(value) for value in file.read_text().split()])
    found = model(values[None] / 16)[0].softmax(0)
    return {f"digit {number}": value for number, value in enumerate(found.tolist())}
"""
FLAGS = ("--queue", "e2e", "--micro-batch", "16", "--threads", "1", "--evaluate-every", "0", "--lr", "0.1")
ROUNDS = ("--rounds", "150", "--checkpoint-every", "50", "--max-workers", "3")


class Person:
    """Who types commands on the machine of a control plane, in a folder with a recipe."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        (folder / "net.py").write_text(DIGITS)

    def types(self, *words: str, code: int = 0) -> str:
        """What a command prints."""
        command = [sys.executable, "-m", "computeshare.cli.main", *words]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.plane.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + (done.stderr if code else "")

    def creates(self, *words: str) -> str:
        """The id of a new job."""
        return str(json.loads(self.types("jobs", *words, "--json"))["id"])


@pytest.fixture(scope="module")
def person(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Person:
    return Person(plane, tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def done(person: Person) -> dict[str, Any]:
    """A job that trained the recipe."""
    job = person.plane.finish(person.creates("create", "--recipe", "net.py", *FLAGS, *ROUNDS))
    assert job["accuracy"] > 0.8
    return job


def test_a_replay_gets_the_same_bits(person: Person, done: dict[str, Any]) -> None:
    told = person.types("jobs", "replay", done["id"], "--recipe", "stored")
    assert "every version matches: 150 from version 1 to 150" in told


def test_the_weights_are_exported_and_the_recipe_predicts(person: Person, done: dict[str, Any]) -> None:
    person.types("export", done["id"], "--recipe", "net.py", "--format", "state_dict", "--output", "net.pt")
    state = torch.load(person.folder / "net.pt", weights_only=True)
    assert state["0.weight"].shape == (16, 64) and int(state["1.num_batches_tracked"]) == 150
    images = __import__("sklearn.datasets").datasets.load_digits()
    (person.folder / "seven.txt").write_text(" ".join(map(str, images.data[1500])))
    told = person.types("predict", done["id"], "seven.txt", "--recipe", "net.py")
    assert re.match(rf"seven\.txt: digit {images.target[1500]} \d", told)
    refused = person.types("generate", done["id"], "--prompt", "x", code=2)
    assert "generates no text here" in refused


def test_a_fork_goes_on_from_the_weights(person: Person, done: dict[str, Any]) -> None:
    child = person.creates("fork", f"{done['id']}@latest", "--recipe", "net.py", "--set", "rounds=10")
    first = person.plane.finish(child)
    assert first["version"] == 10 and first["weights_sha256"] != done["weights_sha256"]
    assert first["accuracy"] > 0.8


def test_a_job_that_failed_is_tried_again_and_ends_with_the_same_bits(person: Person, done: dict[str, Any]) -> None:
    plane, until = person.plane, time.time() + 90
    job = person.creates("create", "--recipe", "net.py", "--arg", f"until={until}", *FLAGS, *ROUNDS)
    plane.until("the job's end", lambda: plane.job(job)["status"] == "failed")
    assert "ValueError: too early. Mend it" in plane.job(job)["error"]
    plane.until("the right time", lambda: time.time() > until)
    person.types("jobs", "retry", job)
    assert plane.finish(job)["weights_sha256"] == done["weights_sha256"]


def test_a_job_survives_the_broker(person: Person, done: dict[str, Any]) -> None:
    plane = person.plane
    job = person.creates("create", "--recipe", "net.py", *FLAGS, *ROUNDS)
    plane.reach(job, 20)
    os.kill(plane.pids("broker")[0], signal.SIGKILL)
    assert plane.finish(job)["weights_sha256"] == done["weights_sha256"]


def test_removed_jobs_leave_nothing_on_the_disk(person: Person) -> None:
    bundles = person.plane.home / "bundles"
    assert list(bundles.glob("[0-9a-f]*"))
    for job in person.plane.get("/v1/jobs")["items"]:
        person.plane.http.delete(f"/v1/jobs/{job['id']}").raise_for_status()
    assert not list(bundles.glob("[0-9a-f]*"))
