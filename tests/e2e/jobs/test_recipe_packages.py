"""A recipe of an installed package: who gets seats, and why others get none."""

from pathlib import Path
from typing import Any

import pytest

from computeshare import ComputeShare
from computeshare.tasks.recipes import bundle
from computeshare.training.recipe_check import Trial, check
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
        (tmp_path / "state").mkdir()
        report = check(bundle.read(Path(RECIPE)), Trial({"width": 16}), tmp_path / "state")
        with ComputeShare(plane.url, (plane.home / "token").read_text().strip()) as session:
            session.upload_bundle(tmp_path / "state")
        facts: dict[str, Any] = report.facts.model_dump(mode="json")
        assert facts["package"] == "blob-recipes 1.2.0"
        about = {"recipe_args": {"width": 16}, "recipe_facts": facts, "queue": "e2e", "micro_batch": 10}
        job = plane.create(recipe=RECIPE, **about, rounds=40, evaluate_every=20, workers={"min": 1, "max": 3})
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
