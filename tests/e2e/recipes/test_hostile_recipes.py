"""Recipes that attack the machine they run on: the job says what happened, and the worker serves the next one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from computeshare import ComputeShare
from computeshare.settings import RunFile
from tests.support.control_plane import ControlPlane, control_plane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEP_LIMIT_S = 12
RECIPE = """
import os, socket, subprocess, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Attacking(nn.Linear):
    def forward(self, inputs):
        if self.training and self.act:
            ACTS[self.act](self.about)
        return super().forward(inputs)


def model(act="", about=""):
    module = Attacking(8, 4)
    module.act, module.about = act, about
    return module


def data(split, folder):
    drawn = torch.Generator().manual_seed(len(split))
    return TensorDataset(torch.randn(128, 8, generator=drawn), torch.arange(128) % 4)


def read(about):
    raise ValueError(Path(about).read_text())  # reading


def connect(about):
    with socket.socket(socket.AF_UNIX) as broker:  # connecting
        broker.connect(about)
        raise ValueError("reached")


def shell(about):
    raise ValueError(subprocess.run(["/bin/sh", "-c", "id"], capture_output=True))  # a shell


def write(about):
    Path(about).write_text("I was here")  # writing
    raise ValueError("written")


def hang(about):
    while True:
        pass


def allocate(about):
    held = []
    while len(held) < 800:  # 50 GB
        held.append(b"x" * (64 << 20))
        time.sleep(0.01)
    raise ValueError("allocated")


ACTS = {one.__name__: one for one in (read, connect, shell, write, hang, allocate)}
"""
CONFINED = "a confined recipe has no network, starts no programs, and uses no files but its own and its data"
FIELDS: dict[str, Any] = {
    "queue": "e2e",
    "rounds": 5,
    "micro_batch": 16,
    "threads": 1,
    "checkpoint_every": 0,
    "evaluate_every": 0,
    "workers": {"min": 1, "max": 1},
}


def line(comment: str) -> str:
    number = 1 + next(number for number, text in enumerate(RECIPE.splitlines()) if text.endswith(f"# {comment}"))
    return f"recipe.py, line {number}: training failed: "


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with two workers of small limits, in the home of a user who has a key."""
    user = tmp_path_factory.mktemp("user")
    (user / ".ssh").mkdir()
    (user / ".ssh/id_ed25519").write_text("PRIVATE KEY")
    limits = {
        "COMPUTESHARE_RECIPES": "true",
        "COMPUTESHARE_STEP_LIMIT": str(STEP_LIMIT_S),
        "COMPUTESHARE_MAX_MEMORY": "3GB",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (limits | {"HOME": str(user)}).items():
            patch.setenv(name, value)
        with control_plane(user / "computeshare", "--workers", "2", "--queue", "e2e") as plane:
            yield plane


@pytest.mark.timeout(600)
def test_hostile_recipes_are_stopped_and_the_workers_serve_on(plane: ControlPlane, tmp_path: Path) -> None:
    token, user = (plane.home / "token").read_text().strip(), plane.home.parent
    run = RunFile.read(plane.home / "run.json")
    assert run
    session = ComputeShare(plane.url, token)
    path = tmp_path / "hostile.py"
    path.write_text(RECIPE)
    workers = plane.pids("worker")
    harmless = session.jobs.create(FIELDS, recipe=str(path))
    about = {name: harmless.document["spec"][name] for name in ("recipe", "recipe_facts")}
    told = {
        ("read", str(plane.home / "token")): line("reading"),
        ("connect", run.redis_url.partition("@")[2].partition("?")[0]): line("connecting"),
        ("shell", ""): line("a shell"),
        ("write", str(user / "mine")): line("writing"),
        ("hang", ""): f"a step of the recipe took more than {STEP_LIMIT_S} s",
        ("allocate", ""): "the recipe's process was killed: it took",
    }
    jobs = {act: plane.create(**FIELDS, **about, recipe_args={"act": act[0], "about": act[1]}) for act in told}
    found: dict[tuple[str, str], str] = {}

    def all_told() -> bool:
        for act, job in jobs.items():
            shown = plane.job(job)
            words = shown["error"] or shown["reason"] or ""
            if act not in found and ("recipe failed on" in words or "cannot take part: the recipe" in words):
                found[act] = words
                session.jobs.get(job).cancel()
        return len(found) == len(told)

    plane.until("the end of all", all_told, patience_s=300)  # a busy machine takes 20 s to start each recipe
    for act, expected in told.items():
        assert expected in found[act], act
        if act[0] not in ("hang", "allocate"):
            assert CONFINED in found[act], act
    assert not [words for words in found.values() if token in words or "uid=" in words]
    assert not (user / "mine").exists()
    plane.finish(harmless.id)
    after = [plane.create(**FIELDS, **about) for _ in workers]
    for job in after:
        plane.finish(job)
    assert plane.pids("worker") == workers and all(psutil.pid_exists(one) for one in workers)


def test_the_control_plane_tries_a_hostile_recipe_without_giving_its_secrets_away(plane: ControlPlane) -> None:
    """A job that comes without the facts of a trial is tried where the token and the database are."""
    created = plane.http.post("/v1/recipes", json={"files": {"recipe.py": RECIPE}})
    arguments = {"act": "read", "about": str(plane.home.parent / ".ssh/id_ed25519")}
    spec = {**FIELDS, "recipe": created.json()["digest"], "recipe_args": arguments}
    refused = plane.http.post("/v1/jobs", json=spec, timeout=60)
    assert refused.status_code == 422
    assert "recipe.py, line " in refused.text and CONFINED in refused.text
    assert "PRIVATE KEY" not in refused.text
