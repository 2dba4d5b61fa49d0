"""States that are stored after several versions: one who takes over repeats the steps since, to the same bits."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs import messages
from computeshare.protocol.reducer_session import StoredStep
from computeshare.reducer import recovery
from computeshare.tensors import layout
from computeshare.transport.connections import connect
from tests.support.drafts import Follower, follow, leased
from tests.support.failpoints import apart
from tests.support.job_reducer import ADAM, Job

MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
LOWRANK = {"codec": {"up": "lowrank2", "down": "lowrank2"}, "optimizer": MOMENTUM}
JOBS: dict[str, dict[str, Any]] = {
    "lowrank": LOWRANK,
    "whole": {"codec": {"up": "lowrank2", "down": "float16"}, "optimizer": ADAM, "schedule": {"name": "cosine"}},
    "average": {**LOWRANK, "ema": 0.5, "decay": "matrices"},
    "clipped": {**LOWRANK, "clip_norm": 1.0},
    "median": {**LOWRANK, "strategy": {"kind": "sync", "combine": "median", "max_norm": 1.0}},
    "local": {
        "strategy": {"kind": "local", "inner_steps": 2, "replicas": 4},
        "codec": {"up": "lowrank1", "down": "int8"},
        "optimizer": None,
    },
    "async": {**LOWRANK, "strategy": {"kind": "async", "buffer": 4, "max_staleness": 2}},
}


@pytest.fixture(autouse=True)
def several_large_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have buckets of 5,000 values, four for the 17,226 of this one, and their weights are never news."""
    monkeypatch.setattr(layout, "BUCKET", 5000)
    monkeypatch.setattr(messages, "NEWS_BYTES", 0)


def steps(job: Job) -> list[StoredStep]:
    return job.reducer.session.steps()


def is_stored(job: Job) -> bool:
    """Whether the current version's state is in the broker."""
    state = job.store.read()
    assert state is not None
    return bool(job.redis.exists(job.store.keys.state(str(state.token))))


def kept(job: Job, what: str) -> int:
    """How many messages of a kind the broker keeps: `state` or `update`."""
    return len(list(job.redis.scan_iter(f"*{job.job_id}*:{what}:*")))


def advance(job: Job, hand: Follower) -> None:
    """The next version, by this hand."""
    assert {sending.submit() for sending in leased(hand)} == {"accepted"}
    job.reducer.advance()


def succeed(job: Job) -> None:
    """Another reducer takes the job over."""
    job.reducer = job.new_reducer()
    assert job.reducer.advance()


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_one_who_takes_over_after_several_versions_recomputes_the_same_bits(
    name: str, start: Callable[..., Job]
) -> None:
    whole, broken = start(**JOBS[name], rounds=9), start(**JOBS[name], rounds=9)
    plain, hand = follow(whole, "solo"), follow(broken, "solo")
    for version in range(1, 9):
        advance(whole, plain)
        advance(broken, hand)
        state = broken.store.read()
        assert state is not None and state.version == version and broken.digest() == whole.digest()
        if version in (1, 4, 6):
            assert not is_stored(broken) and len(steps(broken)) == {1: 1, 4: 3, 6: 2}[version]
            succeed(broken)
            assert is_stored(broken) and steps(broken) == [] and kept(broken, "state") == 1
    assert broken.finish(hand) == whole.finish(plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": {"up": "lowrank2", "down": "float32"}, "optimizer": ADAM},
        {"codec": {"up": "float32", "down": "lowrank2"}, "optimizer": MOMENTUM},
    ],
    ids=["parameters as published", "large updates"],
)
def test_a_state_that_cannot_be_spared_is_stored_after_each_version(
    fields: dict[str, Any], start: Callable[..., Job]
) -> None:
    job = start(**fields)
    hand = follow(job, "solo")
    for _ in range(3):
        job.round(hand)
        assert is_stored(job) and steps(job) == [] and (kept(job, "state"), kept(job, "update")) == (1, 0)


def test_a_small_job_stores_its_state_with_the_commit(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "NEWS_BYTES", 1 << 20)
    job = start(**LOWRANK)
    job.round(follow(job, "solo"))
    assert is_stored(job) and steps(job) == [] and kept(job, "update") == 0


def test_the_broker_keeps_updates_until_a_state_is_stored(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(**LOWRANK)
    hand = follow(job, "solo")
    units = job.spec.plan.units_per_round
    monkeypatch.setattr(recovery, "REPLAYED_VALUES", 3 * (units + 1) * hand.layout.parameters)
    held = []
    for _ in range(5):
        job.round(hand)
        held.append((is_stored(job), len(steps(job)), kept(job, "state"), kept(job, "update")))
    assert held == [
        (False, 1, 1, units),
        (False, 2, 1, 2 * units),
        (True, 0, 1, 0),
        (False, 1, 1, units),
        (False, 2, 1, 2 * units),
    ]


def test_a_job_goes_on_from_its_checkpoint_if_an_update_is_gone_that_a_step_was_made_of(
    start: Callable[..., Job],
) -> None:
    whole, job = start(**LOWRANK), start(**LOWRANK)
    plain, hand = follow(whole, "solo"), follow(job, "solo")
    for _ in range(5):
        whole.round(plain)
        job.round(hand)
    job.reducer.close()
    job.redis.delete(job.store.keys.update(*steps(job)[1].counted[2]))
    succeed(job)
    state = job.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 3)
    assert steps(job) == [] and kept(job, "update") == 0
    assert job.finish(follow(job, "another")) == whole.finish(plain)


@pytest.mark.parametrize("lost", [0, 2, 4], ids=["oldest", "middle", "newest"])
def test_a_job_goes_on_from_its_checkpoint_if_a_step_is_missing(lost: int, start: Callable[..., Job]) -> None:
    whole, job = start(**LOWRANK), start(**LOWRANK)
    plain, hand = follow(whole, "solo"), follow(job, "solo")
    for _ in range(5):
        whole.round(plain)
        job.round(hand)
    assert len(steps(job)) == 5
    job.reducer.close()
    name = job.store.keys.steps()
    assert job.redis.lrem(name, 1, job.redis.lrange(name, 0, -1)[lost]) == 1
    succeed(job)
    state = job.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 3)
    assert steps(job) == [] and kept(job, "update") == 0
    assert job.finish(follow(job, "another")) == whole.finish(plain)


@pytest.mark.parametrize(("point", "version"), [("before_commit", 2), ("after_commit", 3), ("after_state", 3)])
@pytest.mark.parametrize("is_due", [False, True], ids=["state kept back", "state stored"])
@pytest.mark.slow
def test_a_reducer_that_dies_between_states_is_followed_by_one_that_makes_the_same_version_once(
    point: str,
    version: int,
    is_due: bool,
    start: Callable[..., Job],
    redis: Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm, job = start(**LOWRANK), start(**LOWRANK)
    plain = follow(calm, "solo")
    for _ in range(3):
        calm.round(plain)
    if is_due:
        most = 3 * (job.spec.plan.units_per_round + 1) * plain.layout.parameters
        monkeypatch.setattr(recovery, "REPLAYED_VALUES", most)

    def act() -> None:
        job.redis = connect(redis_url)
        job.reducer, hand = job.new_reducer(), follow(job, "first")
        for _ in range(3):
            job.round(hand)

    assert apart(act, f"{point}=kill@3") == -signal.SIGKILL
    state = job.store.read()
    assert state is not None and state.version == version
    assert is_stored(job) == (is_due and point == "after_state")
    succeed(job)
    state = job.store.read()
    assert state is not None and state.version == 3 and job.digest() == calm.digest()
    assert job.finish(follow(job, "second")) == calm.finish(plain)


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "other updates"])
def test_a_step_is_repeated_in_the_memory_of_its_result_and_must_lead_to_the_committed_weights(
    is_damaged: bool, start: Callable[..., Job], redis_url: str
) -> None:
    exact = {"codec": {"up": "float32", "down": "float32"}, "optimizer": MOMENTUM}
    calm, job = start(**exact), start(**exact)
    plain = follow(calm, "solo")
    for _ in range(5):
        calm.round(plain)

    def act() -> None:
        job.redis = connect(redis_url)
        job.reducer, hand = job.new_reducer(), follow(job, "first")
        for _ in range(5):
            job.round(hand)

    assert apart(act, "after_commit=kill@5") == -signal.SIGKILL
    assert not is_stored(job) and len(steps(job)) == 1
    if is_damaged:  # a valid message of other values in the place of an update
        first, second = (job.store.keys.update(*one) for one in steps(job)[0].counted[:2])
        job.redis.copy(first, second, replace=True)
    succeed(job)
    state, handler = job.store.read(), job.reducer.handler
    assert state is not None and handler is not None
    current = handler.current
    assert (state.token.incarnation, state.version) == ((2, 3) if is_damaged else (1, 5))
    assert np.shares_memory(current.model.master, current.model.published.parameters)
    assert job.finish(follow(job, "second")) == calm.finish(plain)


def hands(job: Job) -> list[Follower]:
    return [follow(job, name) for name in "ab"]


def test_one_who_takes_over_after_drafted_versions_repeats_their_steps(start: Callable[..., Job]) -> None:
    whole, early = start(**LOWRANK), start(**LOWRANK)
    plain, pair = follow(whole, "solo"), hands(early)
    for version in range(1, 5):
        whole.round(plain)
        sendings = leased(*pair)
        for bucket in (3, 2, 1, 0):
            for sending in sendings:
                sending.offer(bucket)
            early.reducer.advance()
        assert {sending.submit() for sending in sendings} == {"accepted"}
        early.reducer.advance()
        assert early.digest() == whole.digest() and early.redis.hget(early.store.keys.round(), "draft")
        assert len(steps(early)) == (version if version < 4 else 1)
        if version == 3:
            succeed(early)
    assert early.finish(*pair) == whole.finish(plain)
