"""The evaluator scores the versions that a job asks for, each once, and no other."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from test_rounds import events

from computeshare.artifacts import Artifacts
from computeshare.evaluator import Evaluator
from computeshare.rounds import RoundStore
from computeshare.spec import JobSpec
from computeshare.training import models
from computeshare.types import Token
from tests.checkpoints import write_checkpoint


def save(artifacts: Artifacts, spec: JobSpec, version: int) -> Token:
    module = models.build(spec.model, spec.shape, 10, version)
    layout = models.layout_of(module)
    weights = models.weights_of(module, layout)
    token = Token(1, version, layout.digest(weights)[:16])
    write_checkpoint(artifacts, token, layout.views(weights), b"state", layout.digest(weights), 0, 0)
    return token


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
    artifacts.prune(tokens[-1], spec.wants_checkpoint)
    assert [token.version for token in artifacts.tokens()] == sorted({*scored, 5, 9, 10})
    store.purge()
    unreadable.purge()
