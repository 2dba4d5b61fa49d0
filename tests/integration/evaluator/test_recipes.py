"""Versions of a recipe are scored in a confined process, by evaluators whose owner agreed, if it is signed."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts
from computeshare.evaluator import evaluator as evaluators
from computeshare.evaluator.evaluator import RECIPE_FAILURES, Evaluator
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import RECIPE_EVALUATOR
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import recipes
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.runtime.signatures import SigningKey
from computeshare.tasks.metrics import score as score_of
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.types import Token
from tests.support.evaluated_job import save, save_module
from tests.support.recipes import recipe_job
from tests.support.rounds import events

KEY = SigningKey.new()
POINTS = """
import torch
from torch import nn

def model():
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    module[0].requires_grad_(False)
    return module

def data(split, folder):
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(len(split)))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(dim=1))
"""
OWN = """
def metrics(model, batch):
    inputs, targets = batch
    return {"margin": model(inputs).max(dim=1).values.sum(), "accuracy": (model(inputs).argmax(1) == targets).sum()}
"""
FATAL = """
def metrics(model, batch):
    if not model.training and len(batch[0]) > 8:  # not in the trial
        raise RuntimeError("no more")
    return {"n": batch[1].sum()}
"""
WRONG = """    import sys
    assert split != "test" or "pytest" in sys.modules, "no such file"  # where the job was created it was there
"""


@dataclass
class Scored:
    """A job that trains a recipe, with its evaluator."""

    spec: JobSpec
    task: RecipeTask
    store: RoundStore
    artifacts: Artifacts
    evaluator: Evaluator

    def save(self, version: int) -> Token:
        module = self.task.module(version)
        return save_module(self.artifacts, module, version, frozen_digest(module))

    def run(self) -> None:
        try:
            while self.evaluator._turn():
                pass
        finally:
            self.evaluator._give_up_scorers()


@pytest.fixture
def start(redis: Redis, job_id: str, tmp_path: Path) -> Callable[..., Scored]:
    def start(text: str, key: str = KEY.public, runs: bool = True, **fields: object) -> Scored:
        job = recipe_job(text, tmp_path, evaluate_every=1, **fields)
        bundles = BundleStore(tmp_path / "bundles")
        facts = job.spec.recipe_facts
        assert facts
        document = job.spec.model_dump(mode="json")
        document["recipe_facts"]["initial"] = bundles.add(job.files.initial).digest
        spec = JobSpec.model_validate(document)
        store = RoundStore(redis, job_id)
        store.publish(spec.model_dump_json())
        recipes.publish(redis, job_id, spec, job.files.bundle, KEY)
        runner = RecipeRunner(bundles, key) if runs else None
        evaluator = Evaluator(redis, tmp_path, tmp_path / "data", threading.Event(), runner)
        return Scored(spec, job.task, store, Artifacts(tmp_path, job_id), evaluator)

    return start


def test_versions_are_scored_as_the_recipe_scores_them_in_this_process(start: Callable[..., Scored]) -> None:
    job = start(POINTS, rounds=3, validation=0.2, eval_batch=7)
    tokens = [job.save(version) for version in (1, 2, 3)]
    job.run()
    expected = {}
    for part in ("validation", "test"):
        instance = job.task.instance(0, part, Path())  # type: ignore[arg-type]
        expected[part] = [score_of(instance, instance.layout.gather(job.artifacts.tensors(one)), 7) for one in tokens]
    scores = [job.artifacts.score(token) or {} for token in tokens]
    assert [score["loss"] for score in scores] == pytest.approx([one.loss for one in expected["validation"]], rel=1e-6)
    assert [score["accuracy"] for score in scores] == [one.metrics["accuracy"] for one in expected["validation"]]
    best = max((0, 1, 2), key=lambda number: (scores[number]["accuracy"], -number))
    assert [number for number, score in enumerate(scores) if "test" in score] == sorted({best, 2})
    assert scores[2]["test"]["loss"] == pytest.approx(expected["test"][2].loss, rel=1e-6)
    counts = expected["test"][2].classes
    assert counts and job.artifacts.classes(tokens[2])["test"] == json.loads(counts.model_dump_json())


def test_own_metrics_are_told_beside_the_accuracy_that_versions_are_compared_by(start: Callable[..., Scored]) -> None:
    job = start(POINTS + OWN, rounds=1)
    job.save(1)
    job.run()
    (told,) = events(job.store, "scored")
    instance = job.task.instance(0, "test", Path())
    expected = score_of(instance, instance.layout.gather(job.artifacts.tensors(job.artifacts.tokens()[0]))).metrics
    assert told["accuracy"] == expected["accuracy"]
    assert told["own_metrics"] == {"margin": pytest.approx(expected["margin"])}


@pytest.mark.slow
def test_an_error_of_the_recipe_is_told_once_and_holds_no_other_job_up(
    start: Callable[..., Scored], redis: Redis, job_id: str, tmp_path: Path
) -> None:
    job = start(POINTS + FATAL, rounds=2)
    tokens = [job.save(version) for version in (1, 2)]
    other = RoundStore(redis, f"{job_id}1")
    spec = JobSpec(dataset="digits", model="mlp", rounds=1)
    other.publish(spec.model_dump_json())
    save(Artifacts(tmp_path, other.job_id), spec, 1)
    job.run()
    assert [event["version"] for event in events(other, "scored")] == [1]
    assert [job.artifacts.score(token) for token in tokens] == [None, None]
    (told,) = events(job.store, "unscored")
    assert "metrics() failed: RuntimeError: no more" in told["error"] and "recipe.py, line" in told["error"]
    other.purge()


@pytest.mark.slow
def test_a_recipe_whose_test_split_is_wrong_ends_its_job_which_names_the_split(
    start: Callable[..., Scored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers do for data for training: only who scores opens the test split."""
    monkeypatch.setattr(evaluators, "SET_ASIDE_S", 0.0)
    job = start(POINTS.replace("    inputs =", f"{WRONG}    inputs ="), rounds=1)
    job.save(1)
    for _ in range(RECIPE_FAILURES - 1):
        assert not job.evaluator._turn() and not events(job.store, "failed")
    job.run()
    (failed,) = events(job.store, "failed")
    assert failed["error"].startswith("The recipe failed 3 times where versions are scored, last on the test split: ")
    assert "no such file" in failed["error"] and "recipe.py, line 12" in failed["error"]
    assert "Mend it" in failed["error"] and len(events(job.store, "unscored")) == 1


def test_a_recipe_whose_test_split_fails_after_a_stop_leaves_the_evaluator_alive(start: Callable[..., Scored]) -> None:
    text = POINTS.replace("randn(60", 'randn(60 if split != "test" or "pytest" in sys.modules else 59')
    job = start(
        text.replace("import torch", "import sys, torch", 1),
        rounds=3,
        validation=0.2,
        stop={"metric": "accuracy", "at": 0.01},
    )
    job.save(1)
    job.run()
    (told,) = events(job.store, "unscored")
    assert "the test split: data('test') has 59 samples here, and 60 where the job was created" in told["error"]
    assert not events(job.store, "stopped")


def test_a_recipe_that_this_control_plane_has_not_signed_is_not_run(start: Callable[..., Scored]) -> None:
    job = start(POINTS, key=SigningKey.new().public)
    job.save(1)
    job.run()
    (told,) = events(job.store, "unscored")
    assert "this control plane has not signed it" in told["error"]


def test_an_evaluator_without_consent_leaves_the_job_to_others(start: Callable[..., Scored], redis: Redis) -> None:
    job = start(POINTS, runs=False)
    token = job.save(1)
    job.run()
    assert not events(job.store, "unscored") and not redis.exists(job.store.keys.scoring(str(token)))
    job.evaluator.stop.set()
    job.evaluator._stay_known()
    assert not redis.exists(RECIPE_EVALUATOR)
