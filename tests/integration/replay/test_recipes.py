"""A recipe's job is recomputed in a confined process, from the files that the control plane has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.confinement import process
from computeshare.confinement.methods import NONE
from computeshare.errors import SpecError, Unconfined
from computeshare.jobspec.spec import JobSpec
from computeshare.replay.replay import RecipeSource, Replay
from computeshare.training.recipe_process import process as recipe_process
from tests.support.job_reducer import Job
from tests.support.recipes import CONVOLUTIONS, recipe_job
from tests.support.rounds import events


class Plane:
    """A control plane's record of a job, as a client reads it."""

    def __init__(self, job: Job, files: dict[str, str]) -> None:
        store = BundleStore(job.root / "bundles")
        versions = events(job.store, "version")
        document = {"id": job.job_id, "spec": job.spec.model_dump(mode="json"), "status": "completed"}
        self.versions_told = [{**one, "version": int(one["token"].split(".")[1])} for one in versions]
        self.show = lambda _: document | {"version": len(versions), "durable_version": len(versions)}
        self.workers = lambda _: [{"id": "alone", "kinds": []}]
        self.recipes = SimpleNamespace(show=lambda _: {"files": files})
        self.bundles = SimpleNamespace(
            show=lambda digest: {"files": [one.model_dump() for one in store.manifest(digest).files]},
            piece=store.piece,
        )

    def versions(self, _: str, first: int, last: int) -> list[dict[str, Any]]:
        return [one for one in self.versions_told if first <= one["version"] <= last]


@pytest.fixture
def plane(redis: Redis, job_id: str, tmp_path: Path) -> Plane:
    fields = {"rounds": 3, "micro_batch": 20, "threads": 1, "evaluate_every": 0}
    recipe = recipe_job(CONVOLUTIONS, tmp_path, **fields)
    document = recipe.spec.model_dump(mode="json")
    document["recipe_facts"]["initial"] = BundleStore(tmp_path / "bundles").add(recipe.files.initial).digest
    job = Job(redis, job_id, JobSpec.model_validate(document), tmp_path)
    job.finish(job.hand("alone", recipe.task.instance(0, "train", Path())))
    return Plane(job, dict(recipe.files.bundle.files))


def test_every_version_is_the_same_again(plane: Any, job_id: str, tmp_path: Path) -> None:
    replay = Replay(plane, job_id, tmp_path, recipe=RecipeSource("stored", tmp_path / "cache"))
    assert [one.version for one in replay.run()] == [1, 2, 3]
    assert replay.verdict().outcome == "matches"


def test_nothing_of_a_recipe_runs_without_the_users_word(plane: Any, job_id: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="runs here only if you say so"):
        next(Replay(plane, job_id, tmp_path).run())


def test_where_nothing_confines_it_runs_by_a_further_word_alone(
    plane: Any, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (process, recipe_process):
        monkeypatch.setattr(module, "method", lambda: NONE)
    with pytest.raises(Unconfined, match="Or add --unconfined"):
        next(Replay(plane, job_id, tmp_path, recipe=RecipeSource("stored", tmp_path / "cache")).run())
    replay = Replay(plane, job_id, tmp_path, last=1, recipe=RecipeSource("stored", tmp_path / "cache", unconfined=True))
    assert [one.differs for one in replay.run()] == [False]
