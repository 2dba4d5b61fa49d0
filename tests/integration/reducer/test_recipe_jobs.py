"""A reducer serves a recipe's job without running the recipe: what it needs was found before."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from redis import Redis
from torch import nn

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.reducer import process
from computeshare.reducer.job_thread import JobThread
from computeshare.reducer.process import Reducer
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.modules import frozen_digest, layout_of, weights_of
from computeshare.tasks.recipes.functions import Functions
from computeshare.tasks.recipes.task import RecipeTask
from tests.support.job_reducer import Job
from tests.support.recipe_jobs import recipe_spec, stored_facts
from tests.support.rounds import events
from tests.support.wait import wait_until


class Points:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 100, 1.0, -1.0]), index % 2


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def instance(seed: int, state: Path | None = None) -> TaskInstance:
    """The recipe in this process, as a worker's own process has it."""
    task = RecipeTask(Functions(Path("/recipe"), model, lambda split, folder: Points()), "sha256:0", {}, state=state)
    return task.instance(seed, "train", Path())


def spec_of(began: nn.Module, root: Path, **changes: Any) -> Any:
    """A job whose version 0 is this module, in the store of a reducer with this root."""
    facts = stored_facts(began, BundleStore(root / "bundles"))
    fields = {"rounds": 4, "micro_batch": 10, "checkpoint_every": 2, "evaluate_every": 0, "threads": 1, **changes}
    return recipe_spec(recipe_facts=facts, **fields)


def test_a_job_begins_with_what_was_found_and_goes_on_without_it(redis: Redis, tmp_path: Path, job_id: str) -> None:
    began = instance(7).module
    spec = spec_of(began, tmp_path)
    layout, frozen = layout_of(began), frozen_digest(began)
    version_0 = layout.digest(weights_of(began, layout))
    initial = BundleStore(tmp_path / "bundles").open_files(spec.recipe_facts.initial)
    digests = []
    for number, workers in enumerate((["alone"], ["first", "second"])):
        job = Job(redis, f"{job_id}{number}", spec, tmp_path)
        assert events(job.store, "opened")[0]["sha256"] == version_0
        terms: Any = redis.hget(job.store.keys.round(), "frozen")
        assert terms.decode() == frozen
        hands = [job.hand(worker, instance(8, initial)) for worker in workers]
        job.round(*hands)
        job.reducer = job.new_reducer()
        digests.append(job.finish(*hands))
        assert {job.reducer.artifacts.manifest(token).frozen for token in job.reducer.artifacts.tokens()} == {frozen}
    assert digests[0] == digests[1] != version_0[:16]
    BundleStore(tmp_path / "bundles").remove(spec.recipe_facts.initial)
    redis.delete(job.store.keys.round())  # as if the broker had lost the rounds
    assert job.new_reducer().advance()
    assert events(job.store, "opened")[-1]["restored"]


def test_a_job_whose_initial_weights_are_absent_fails_and_says_what_to_do(
    redis: Redis, tmp_path: Path, job_id: str
) -> None:
    spec = spec_of(model(), tmp_path)
    BundleStore(tmp_path / "bundles").remove(spec.recipe_facts.initial)
    error = failed(redis, tmp_path, job_id, spec)
    assert "the job cannot begin" in error and "`computeshare jobs create --recipe` uploads them again" in error


def test_a_model_that_a_recipe_must_split_fails_where_no_recipe_runs(redis: Redis, tmp_path: Path, job_id: str) -> None:
    error = failed(redis, tmp_path, job_id, to_be_split(tmp_path))
    assert "which this reducer may not run: start it with --recipes" in error


def test_a_reducer_that_cannot_open_a_job_leaves_it_to_others_for_a_while(
    redis: Redis, tmp_path: Path, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, unable = RoundStore(redis, job_id), Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())
    store.publish(to_be_split(tmp_path).model_dump_json())
    unable.claim_jobs()
    assert job_id not in unable.jobs
    able = Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event(), Mock(RecipeRunner))
    claimed_by(able, job_id)
    able.stop.set()
    able.run()
    redis.delete(store.keys.reducer())
    store.publish(to_be_split(tmp_path).model_dump_json())
    monkeypatch.setattr(process, "UNABLE_STAND_BACK_S", 0.0)  # nobody else came
    claimed_by(unable, job_id)
    wait_until(lambda: any("start it with --recipes" in one["error"] for one in events(store, "failed")))
    unable.stop.set()
    unable.run()
    store.purge()


def claimed_by(reducer: Reducer, job_id: str) -> None:
    """Have a reducer claim a job; it may claim jobs of other tests first, and then stands back a little longer."""

    def has_claimed() -> bool:
        reducer.claim_jobs()
        return job_id in reducer.jobs

    wait_until(has_claimed)


def to_be_split(folder: Path) -> JobSpec:
    """A job whose recipe's model is to be split into stages."""
    document = spec_of(model(), folder).model_dump(mode="json")
    document |= {"strategy": {"kind": "pipeline"}, "codec": {"up": "float32", "down": "float32"}}
    return JobSpec.model_validate(document)


def failed(redis: Redis, folder: Path, job_id: str, spec: JobSpec) -> str:
    """The error with which a job fails in a reducer that runs no recipes."""
    store = RoundStore(redis, job_id)
    store.publish(spec.model_dump_json())
    session = ReducerSession(redis, job_id, "reducer")
    assert session.claim("host", 1, 60_000)
    thread = JobThread(session, folder, folder / "bundles", threading.Event())
    thread.start()
    thread.join()
    error: str = events(store, "failed")[0]["error"]
    store.purge()
    return error
