"""A recipe of an installed package: who gets seats, and why others get none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from computeshare import ComputeShare
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.recipe_packages import install

RECIPE = "package:blobs"


def reasons(plane: ControlPlane) -> dict[str, list[str]]:
    return {one["name"]: one["left_out"] for one in plane.get("/v1/workers")["items"]}


def test_workers_without_the_package_or_with_another_version_get_no_seat_and_the_job_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = (install(version, tmp_path) for version in ("1.2.0", "1.1.0"))
    monkeypatch.syspath_prepend(new)
    monkeypatch.setenv("PYTHONPATH", str(new))
    with (
        control_plane(tmp_path / "home", "--queue", "e2e") as plane,
        plane.worker("e2e", "old", "--recipes", PYTHONPATH=str(old)),
        plane.worker("e2e", "none", "--recipes", PYTHONPATH=""),
    ):
        plane.until("two workers", lambda: reasons(plane).keys() == {"old", "none"})
        about = {"recipe_args": {"width": 16}, "queue": "e2e", "micro_batch": 10, "rounds": 40, "threads": 1}
        about |= {"evaluate_every": 20, "workers": {"min": 1, "max": 3}}
        with ComputeShare(plane.url, (plane.home / "token").read_text().strip()) as session:
            made = session.jobs.create(about, recipe=RECIPE)
            assert made.spec["recipe_facts"]["package"] == "blob-recipes 1.2.0" and not session.client.recipes.list()
        job = made.id
        install_it = "install blob-recipes==1.2.0 there, then start the worker again"
        why = {
            "old": f"old has blob-recipes 1.1.0, and the job needs blob-recipes 1.2.0: {install_it}",
            "none": f"none has no recipe blobs: {install_it}",
        }
        plane.until("the reason", lambda: all(text in str(plane.job(job)["reason"]) for text in why.values()))
        assert reasons(plane) == {name: [f"Job {job}: {text}"] for name, text in why.items()}
        with plane.worker("e2e", "has", "--recipes"):
            done = plane.finish(job)
        assert [one["name"] for one in plane.get(f"/v1/jobs/{job}/workers")["items"]] == ["has"]
        assert done["title"] == "recipe blobs" and done["accuracy"] > 0.7
        again = ["jobs", "create", "--recipe", RECIPE, "--arg", "width=8", "--queue", "e2e", "--json"]
        command = [sys.executable, "-m", "computeshare.cli.main", *again]
        told = subprocess.run(command, env=plane.environment, capture_output=True, text=True, check=True)
        assert json.loads(told.stdout)["spec"]["recipe"] == RECIPE
