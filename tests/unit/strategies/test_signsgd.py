"""Majority vote of signs: what a plain loop over weights and votes finds, however it is cut or sent."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from api.jobs.forks import changed
from computeshare.codecs.messages import decode_update, encode_update
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.base import Contributions
from computeshare.strategies.signsgd import SignStrategy
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Weights
from computeshare.training.server_step import ServerStep
from computeshare.types import Vector

RNG = np.random.default_rng(0)
SIGN = SignStrategy()


def votes(count: int, size: int = 500) -> list[Vector]:
    """Gradients with some zeros in them, so that votes are tied in places."""
    return [np.round(RNG.normal(size=size), 0).astype(np.float32) for _ in range(count)]


def loop(updates: list[Vector]) -> list[int]:
    """The majority, a weight at a time."""
    found = []
    for values in zip(*updates, strict=True):
        ups, downs = sum(value > 0 for value in values), sum(value < 0 for value in values)
        found.append(1 if ups > downs else -1 if downs > ups else 0)
    return found


def majority(updates: list[Vector]) -> Vector:
    return SIGN.gradient([SIGN.sent(one) for one in updates], Contributions([1] * len(updates)))


def job(**changes: Any) -> JobSpec:
    base = {"dataset": "digits", "model": "mlp", "strategy": {"kind": "signsgd", "lr": 0.01}}
    return JobSpec.model_validate(base | changes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 32])
def test_each_weight_goes_where_most_micro_batches_want_it(count: int) -> None:
    updates = votes(count)
    got = majority(updates)
    assert got.dtype == np.float32 and got.tolist() == loop(updates)
    assert count % 2 or 0 in got


def test_nothing_given_is_changed_and_a_larger_vector_is_as_its_pieces() -> None:
    updates = votes(3, size=(1 << 17) + 5)
    before, out = [one.copy() for one in updates], np.full(len(updates[0]), 9, np.float32)
    assert SIGN.gradient(updates, Contributions([1] * 3), out) is out
    assert all(np.array_equal(a, b) for a, b in zip(before, updates, strict=True))
    pieces = [majority([one[part] for one in updates]) for part in (slice(0, 1000), slice(1000, None))]
    assert np.array_equal(out, np.concatenate(pieces))


def test_a_large_value_is_one_vote_as_any_other() -> None:
    honest, liar = [np.float32([1, -1])] * 2, np.float32([-1e30, 1e30])
    assert SIGN.gradient([*honest, liar], Contributions([1] * 3)).tolist() == [1, -1]


def test_a_micro_batch_has_one_vote_whatever_its_samples() -> None:
    updates = votes(3)
    unequal = SIGN.gradient(updates, Contributions([32, 32, 1]))
    assert np.array_equal(unequal, majority(updates))


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16", "int8"])
def test_votes_arrive_as_they_were_cast(codec: str) -> None:
    spec = job()
    layout = task_of(spec).layout()
    cast = [SIGN.sent(one) for one in votes(3, layout.parameters)]
    none = np.empty(0, np.float32)
    sent = [encode_update(CODECS[codec], one, none, layout, 7) for one in cast]
    arrived = [decode_update(CODECS[codec], one, layout)[0] for one in sent]
    about = Contributions([1] * 3)
    assert np.array_equal(SIGN.gradient(arrived, about), SIGN.gradient(cast, about))


def test_a_step_moves_each_weight_by_the_rate() -> None:
    spec = job()
    layout = task_of(spec).layout()
    none = np.empty(0, np.float32)
    start = Weights(np.zeros(layout.parameters, np.float32), none, np.empty(0, np.int64))
    server_step = ServerStep(spec, layout)
    updates = votes(3, layout.parameters)
    model = server_step.step(1, server_step.load(start, b""), [(one, none) for one in updates], [32] * 3)
    np.testing.assert_allclose(model.master, -0.01 * np.float32(loop(updates)), rtol=1e-6)


def test_the_optimizer_follows_from_the_strategy() -> None:
    spec = job()
    assert spec.optimizer == OptimizerSpec(name="SGD", lr=0.01)
    assert job(micro_batches_per_round=9).plan.units_per_round == 9
    for changes, says in (
        ({"optimizer": {"name": "Adam"}}, "set strategy.lr instead"),
        ({"lr_scaling": "linear"}, "lr instead"),
    ):
        with pytest.raises(ValidationError, match=says):
            job(**changes)
    with pytest.raises(ValidationError, match="greater than 0"):
        job(strategy={"kind": "signsgd", "lr": 0})


def test_a_fork_with_another_rate_steps_by_that() -> None:
    document = job().model_dump(mode="json")
    fork = JobSpec.model_validate(changed(document, {"strategy": {**document["strategy"], "lr": 0.5}}))
    assert fork.optimizer == OptimizerSpec(name="SGD", lr=0.5)
