"""The evaluator scores the versions that a job asks for, each once, and no other."""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis

from computeshare.checkpoints.store import WEIGHTS, Artifacts
from computeshare.errors import ArtifactError
from computeshare.evaluator import evaluator as evaluators
from computeshare.evaluator.evaluator import Evaluator
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import EVALUATOR
from computeshare.protocol.round_store import RoundStore
from computeshare.tasks.metrics import score as score_of
from computeshare.tasks.registry import task_of
from tests.support.evaluated_job import save, save_average, save_module
from tests.support.rounds import events
from tests.support.wait import wait_until


@pytest.fixture
def start(redis: Redis, job_id: str, tmp_path: Path) -> Callable[..., tuple[Evaluator, RoundStore, Artifacts]]:
    def start(spec: JobSpec) -> tuple[Evaluator, RoundStore, Artifacts]:
        store = RoundStore(redis, job_id)
        store.publish(spec.model_dump_json())
        evaluator = Evaluator(redis, tmp_path, tmp_path / "data", threading.Event())
        return evaluator, store, Artifacts(tmp_path, job_id)

    return start


@pytest.mark.parametrize(("every", "scored"), [(4, [4, 8, 10]), (0, [10])], ids=str)
def test_only_versions_that_were_asked_for_and_the_last_are_scored(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]], every: int, scored: list[int]
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=10, checkpoint_every=5, evaluate_every=every)
    undecided = JobSpec(dataset="digits", model="mlp", rounds=12, codec="auto", evaluate_every=every)
    evaluator, store, artifacts = start(undecided)
    assert not evaluator._turn()
    store.publish(spec.model_dump_json())
    unreadable = RoundStore(store.redis, f"0{store.job_id}")  # of another release; its turn comes first
    unreadable.publish("{}")
    tokens = [save(artifacts, spec, version) for version in (3, 4, 5, 8, 9, 10)]
    while evaluator._turn():
        pass
    assert [token.version for token in tokens if artifacts.score(token)] == scored
    assert sorted(event["version"] for event in events(store, "scored")) == scored
    store.purge()
    unreadable.purge()


def test_the_moving_average_is_scored_in_place_of_its_version(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]],
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=2, evaluate_every=1, ema=0.9)
    evaluator, store, artifacts = start(spec)
    plain, averaged = save(artifacts, spec, 1), save_average(artifacts, spec, 2, like=1)
    while evaluator._turn():
        pass
    assert artifacts.score(averaged) == artifacts.score(plain) is not None
    store.purge()


def test_versions_are_scored_on_the_held_out_samples_and_the_best_and_the_last_on_the_test_set_too(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]],
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=4, evaluate_every=1, eval_batch=7, validation=0.1)
    evaluator, store, artifacts = start(spec)
    tokens = [save(artifacts, spec, version) for version in (1, 2, 3, 4)]
    while evaluator._turn():
        pass
    scores = [artifacts.score(token) or {} for token in tokens]
    assert {score["samples"] for score in scores} == {144}
    best = max(scores, key=lambda score: score["accuracy"])
    assert best is not scores[-1]  # else this shows nothing
    assert [score for score in scores if "test" in score] == [best, scores[-1]]
    told = events(store, "scored")
    assert [(one["version"], "test" in one) for one in told[-2:]] == [(scores.index(best) + 1, True), (4, True)]
    task = task_of(spec)
    parts = {part: task.instance(spec.seed, part, evaluator.data_dir) for part in ("train", "validation", "test")}
    for score, token in ((best, tokens[scores.index(best)]), (scores[-1], tokens[-1])):
        weights = parts["test"].layout.gather(artifacts.tensors(token))
        expected = {part: score_of(parts[part], weights, 7) for part in ("validation", "test")}
        validated, tested = expected["validation"], expected["test"]
        assert (score["loss"], score["accuracy"]) == (validated.loss, validated.metrics["accuracy"])
        assert score["test"]["samples"] == 360
        assert score["test"]["loss"] == tested.loss != score["loss"]
        assert score["loss"] != score_of(parts["validation"], weights).loss, "another batch size rounds otherwise"
        on_disk = {part: counts.classes.model_dump() for part, counts in expected.items() if counts.classes}
        assert json.loads(json.dumps(on_disk)) == artifacts.classes(token)
    assert [token for token in tokens if "test" in artifacts.classes(token)] == [tokens[scores.index(best)], tokens[-1]]
    assert all(event.keys().isdisjoint({"classes", "confusion"}) for event in events(store, "scored"))
    whole = task.open("train", evaluator.data_dir)
    images = [parts[part].split.batch(np.arange(len(parts[part].split)))[0] for part in ("train", "validation")]
    both = sorted(image.numpy().tobytes() for image in torch.cat(images))
    assert both == sorted(image.numpy().tobytes() for image in whole.batch(np.arange(len(whole)))[0])
    store.purge()


def test_the_last_version_waits_while_another_evaluator_scores_one_before_it(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]],
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=2, evaluate_every=1, validation=0.1)
    evaluator, store, artifacts = start(spec)
    first, last = (save(artifacts, spec, version) for version in (1, 2))
    store.redis.set(store.keys.scoring(str(first)), "another evaluator", px=5000)
    assert not evaluator._turn() and artifacts.score(last) is None
    store.redis.delete(store.keys.scoring(str(first)))
    while evaluator._turn():
        pass
    assert "test" in (artifacts.score(last) or {})
    store.purge()


def test_a_language_models_versions_come_with_a_sample_that_the_jobs_seed_decides(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]], shakespeare_dir: Path
) -> None:
    size = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 2048}
    fields = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": size, "rounds": 3, "evaluate_every": 1}
    spec = JobSpec.model_validate({**fields, "seed": 7})
    evaluator, store, artifacts = start(spec)
    evaluator.data_dir = shakespeare_dir
    task = task_of(spec)
    modules = [task.module(version) for version in (1, 2, 3)]
    for parameter in modules[1].parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    tokens = [save_module(artifacts, module, version) for version, module in enumerate(modules, 1)]
    while evaluator._turn():
        pass
    first, diverged, last = (artifacts.score(token) or {} for token in tokens)
    assert [len(score["sample"]) for score in (first, last)] == [200, 200]
    assert first["sample"] == task.sample(modules[0].eval(), 7) != task.sample(modules[0], 8)
    assert first["sample"] != last["sample"]
    assert math.isnan(diverged["loss"]) and "sample" not in diverged
    assert {one["version"]: one.get("sample") for one in events(store, "scored")} == {
        1: first["sample"],
        2: None,
        3: last["sample"],
    }
    store.purge()


def test_a_job_with_a_backlog_starves_no_other(redis: Redis, tmp_path: Path) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=100, evaluate_every=1)
    short = JobSpec(dataset="digits", model="mlp", rounds=3, evaluate_every=1)
    evaluator = Evaluator(redis, tmp_path, tmp_path / "data", threading.Event())
    jobs = {"00backlog": (spec, range(1, 41)), "11short": (short, range(1, 4))}
    stores = {name: RoundStore(redis, name) for name in jobs}
    for name, (its, versions) in jobs.items():
        stores[name].publish(its.model_dump_json())
        for version in versions:
            save(Artifacts(tmp_path, name), its, version)
    for _ in range(6):
        assert evaluator._turn()
    scored = {name: [event["version"] for event in events(store, "scored")] for name, store in stores.items()}
    assert scored["11short"] == [3, 2, 1] and scored["00backlog"][0] == 40
    for store in stores.values():
        store.purge()


def test_an_evaluator_at_work_keeps_its_claim_and_is_seen(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluators, "CLAIM_MS", 2000)
    monkeypatch.setattr(evaluators, "RENEW_S", 0.05)
    spec = JobSpec(dataset="digits", model="mlp", rounds=3)
    evaluator, store, artifacts = start(spec)
    token = save(artifacts, spec, 3)
    other = Evaluator(store.redis, artifacts.folder.parent, evaluator.data_dir, threading.Event())
    judged, tries = Evaluator._score, []

    def slow(self: Evaluator, *arguments: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 3  # longer than a claim lives that nobody renews
        while time.monotonic() < deadline or len(tries) < 4:
            tries.append(other._turn())
            time.sleep(0.05)
        wait_until(lambda: store.redis.exists(EVALUATOR))  # nobody renews it once the evaluator is to stop
        evaluator.stop.set()
        return judged(self, *arguments)

    monkeypatch.setattr(evaluator, "_score", slow.__get__(evaluator))
    evaluator.run()
    assert not any(tries)
    assert len(events(store, "scored")) == 1 and artifacts.score(token) is not None
    store.purge()


@pytest.mark.parametrize(("cause", "is_lost"), [(OSError(24, "too many open files"), False), (ValueError("?"), True)])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_marked_for_removal(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]],
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception,
    is_lost: bool,
) -> None:
    evaluator, store, artifacts = start(JobSpec(dataset="digits", model="mlp", rounds=3, evaluate_every=1))
    token = save(artifacts, JobSpec(dataset="digits", model="mlp", rounds=3), 2)

    def unreadable(*_: object, **__: object) -> None:
        raise ArtifactError("missing or damaged") from cause

    monkeypatch.setattr(Artifacts, "tensors", unreadable)
    evaluator._turn()
    assert events(store, "damaged") and artifacts.is_damaged(token) == is_lost
    store.purge()


def cut(content: bytes) -> bytes:
    return content[:100]


def altered(content: bytes) -> bytes:
    """One bit of the last value differs."""
    return content[:-1] + bytes([content[-1] ^ 0x40])


@pytest.mark.parametrize("damage", [cut, altered])
def test_a_damaged_checkpoint_on_the_way_is_told_and_holds_nothing_up(
    start: Callable[..., tuple[Evaluator, RoundStore, Artifacts]], damage: Callable[[bytes], bytes]
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=3, evaluate_every=1)
    evaluator, store, artifacts = start(spec)
    damaged, whole = save(artifacts, spec, 2), save(artifacts, spec, 3)
    path = artifacts.path(damaged, WEIGHTS)
    path.write_bytes(damage(path.read_bytes()))
    while evaluator._turn():
        pass
    assert [event["token"] for event in events(store, "damaged")] == [str(damaged)]
    assert [event["token"] for event in events(store, "scored")] == [str(whole)]
    assert artifacts.is_damaged(damaged) and not artifacts.is_damaged(whole)  # so that it is removed in its turn
    store.purge()
