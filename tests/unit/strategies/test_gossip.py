"""Gossip: what a version is made of, which jobs may have it, and how far vectors are from their mean."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.averages import Spread
from computeshare.strategies.base import Contributions
from computeshare.strategies.gossip import GossipStrategy

RNG = np.random.default_rng(0)


def job(**changes: Any) -> JobSpec:
    base: dict[str, Any] = {
        "dataset": "digits",
        "model": "mlp",
        "strategy": {"kind": "gossip", "every": 5, "buffer": 4},
    }
    return JobSpec.model_validate(base | changes)


def test_a_version_is_the_mean_of_the_peers() -> None:
    version = RNG.normal(size=50).astype(np.float32)
    peers = [RNG.normal(size=50).astype(np.float32) for _ in range(3)]
    gradient = GossipStrategy().gradient([version - peer for peer in peers], Contributions([5, 5, 5]))
    spec = job()
    assert (spec.optimizer.name, spec.optimizer.arguments) == ("SGD", {"lr": 1.0})
    assert version - gradient == pytest.approx(np.mean(peers, axis=0), abs=1e-6)


def test_a_round_is_a_window_of_units_of_several_steps() -> None:
    spec = job()
    assert spec.micro_batches_per_round == 20 and spec.plan.inner_steps == 5
    assert spec.round_from(0).needed == 4 < spec.round_from(0).total


@pytest.mark.parametrize("codec", ["auto", {"up": "topk"}, {"down": "int8"}, {"down": "float16"}])
def test_weights_that_are_differences_need_an_exact_version_and_no_residual(codec: Any) -> None:
    with pytest.raises(ValidationError, match="strategy gossip publishes weights as differences") as raised:
        job(codec=codec)
    assert raised.value.errors()[0]["loc"] == ("codec",)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"interpolation": "magic"}, "'constant', 'clock' or 'loss'"),
        ({"factor": 1.5}, "less than or equal to 1"),
        ({"divergence_threshold": -1}, "greater than or equal to 0"),
        ({"fetch_probability": 1.1}, "less than or equal to 1"),
        ({"timeout_ms": 0}, "greater than or equal to 1"),
        ({"timeout_ms": 600_001}, "less than or equal to 600000"),
        ({"matching": "ring"}, "'random' or 'pairs'"),
        ({"max_norm": 0}, "greater than 0"),
        ({"max_staleness": 21}, "less than or equal to 20"),
        ({"outer_lr": 2.1}, "less than or equal to 2"),
        ({"outer_momentum": 1}, "less than 1"),
        ({"every": 0}, "greater than or equal to 1"),
        ({"every": 10_000, "buffer": 4096}, "buffer x every must be at most 100,000"),
        ({"fan_out": 3}, "fields of strategy gossip"),
    ],
)
def test_a_wrong_field_is_named(strategy: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        job(strategy={"kind": "gossip", **strategy})


def test_audits_are_refused_because_no_other_machine_computes_the_same() -> None:
    with pytest.raises(ValidationError, match="weights of its own"):
        job(audit=0.1)
    assert job().with_audits(is_open=True).audit is None


def test_a_share_is_never_outside_one_and_nothing() -> None:
    clock, loss = GossipStrategy(interpolation="clock"), GossipStrategy(interpolation="loss", divergence_threshold=1.0)
    assert clock.share((0, 1.0), (0, 1.0)) == 0.5
    assert clock.share((0, 1.0), (9, 1.0)) == 1.0
    assert loss.share((3, 0.0), (3, 0.0)) == 0.0
    assert loss.share((3, -2.0), (3, 1.0)) == 0.0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_spread_is_the_squared_distance_from_the_mean(count: int) -> None:
    vectors = RNG.normal(loc=1000, scale=1e-2, size=(count, 400)).astype(np.float32)
    spread = Spread()
    for where in (slice(0, 100), slice(100, 400)):
        passed = [values.copy() for values in spread.of(vectors[:, where])]
        assert np.array_equal(passed, vectors[:, where])
    exact = np.square(vectors - vectors.astype(float).mean(axis=0)).sum()
    assert spread.square == pytest.approx(exact, rel=0.03, abs=1e-12)


def test_a_mean_stands_for_the_vectors_it_is_of() -> None:
    vectors = RNG.normal(loc=1000, scale=1e-2, size=(7, 400)).astype(np.float32)
    aside = vectors[4:].astype(float).mean(axis=0)
    spread = Spread(float(np.square(vectors[4:] - aside).sum()))
    assert len([*spread.of([*vectors[:4], aside.astype(np.float32)], [1, 1, 1, 1, 3])]) == 5
    exact = np.square(vectors - vectors.astype(float).mean(axis=0)).sum()
    assert spread.square == pytest.approx(exact, rel=0.03)


def test_a_peer_keeps_as_many_references_as_its_units_may_be_stale() -> None:
    strategy = GossipStrategy(max_staleness=5)
    assert strategy.recent == 6 and strategy.extra_vectors == GossipStrategy().extra_vectors + 3
