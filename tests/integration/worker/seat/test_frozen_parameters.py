"""Parameters that need no gradient: they do not travel, and nobody takes part who has built others."""

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from torch import nn

from computeshare.evaluator.evaluator import Evaluator
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.tasks import trained
from computeshare.tasks.images import models, small_models
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.registry import task_of
from computeshare.worker.seat.seat import SeatSession
from tests.support.job_reducer import Job, spec_of
from tests.support.rounds import events


class Machine:
    """Builds the model `mlp` with its first layer frozen, where `error` is added to that layer's bias."""

    error = 0.0

    def mlp(self, shape: models.Shape, classes: int) -> nn.Module:
        module = small_models.mlp(shape, classes)
        layer = module.get_submodule("fc1").requires_grad_(False)
        layer.get_parameter("bias").add_(self.error)
        return module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setitem(models.OWN, "mlp", machine.mlp)
    return machine


@pytest.fixture
def start(redis: Redis, tmp_path: Path, machine: Machine) -> Callable[..., Job]:
    def start(**changes: Any) -> Job:
        job_id = secrets.token_hex(4)
        return Job(redis, job_id, spec_of(**changes), tmp_path / job_id)

    return start


def seat(job: Job, root: Path) -> SeatSession:
    """A seat of a worker, as its process runs it."""
    seat = Seat("aaaaaaaaaaaa", job.job_id, 1, 1)
    job.redis.hset(job.store.keys.seats(), seat.worker, seat.id)
    return SeatSession(job.redis, seat, job.spec, Settings(home=root), threading.Event())


def demanded(store: RoundStore) -> str:
    raw: Any = store.redis.hget(store.keys.round(), "frozen")
    return bytes(raw).decode()


def test_what_is_frozen_stays_and_does_not_travel(start: Callable[..., Job]) -> None:
    job = start()
    first, second = job.hand("first"), job.hand("second")
    before = frozen_digest(first.module)
    job.finish(first, second)
    assert frozen_digest(first.module) == before == demanded(job.store)
    alone = start()
    assert alone.finish(alone.hand("alone")) == job.digest()
    artifacts = job.reducer.artifacts
    last = artifacts.tokens()[-1]
    assert artifacts.manifest(last).frozen == before
    tensors = artifacts.tensors(last)
    assert "fc1.bias" not in tensors and "fc2.bias" in tensors
    state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    module = trained.module_of(task_of(job.spec), state, job.spec.seed)
    assert frozen_digest(module) == before


def test_a_worker_that_builds_others_gets_no_seat_and_the_job_says_why(
    start: Callable[..., Job], machine: Machine, tmp_path: Path
) -> None:
    job = start()
    machine.error = 1e-3
    reason = seat(job, tmp_path).run("cpu")
    assert "this one builds others than the job's" in reason
    (told,) = events(job.store, "unfit")
    assert (told["worker"], told["reason"]) == ("aaaaaaaaaaaa", reason)
    assert events(job.store, "joined") == [] and job.redis.hgetall(job.store.keys.sessions()) == {}


def test_a_reducer_elsewhere_demands_what_the_job_began_with(start: Callable[..., Job], machine: Machine) -> None:
    job = start()
    hand = job.hand("one")
    before = demanded(job.store)
    for _ in range(3):  # up to a checkpoint
        job.round(hand)
    job.reducer.close()
    machine.error = 1e-3
    other = job.new_reducer()
    assert other.session.discard()
    assert other.advance()
    assert demanded(job.store) == before
    other.close()


def test_an_evaluator_that_builds_others_scores_nothing(start: Callable[..., Job], machine: Machine) -> None:
    job = start()
    job.finish(job.hand("one"))
    artifacts, evaluators = job.reducer.artifacts, []
    for _ in range(2):
        evaluators.append(Evaluator(job.redis, job.root, job.root / "data", threading.Event()))
    last = artifacts.tokens()[-1]
    machine.error = 1e-3
    while evaluators[0]._turn():
        pass
    assert artifacts.score(last) is None
    machine.error = 0.0
    job.redis.delete(job.store.keys.scoring(str(last)))  # the first one's claim would expire
    while evaluators[1]._turn():
        pass
    assert artifacts.score(last) is not None
