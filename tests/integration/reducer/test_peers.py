"""Versions of a job whose workers have weights of their own: their mean, whatever the reference of each."""

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs.messages import decode_update, decode_weights, encode_update, update_parts, weights_parts
from computeshare.codecs.registry import EXACT
from computeshare.gossip import peer_weights
from computeshare.gossip.peer_weights import PeerWeights
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.tasks.registry import task_of
from computeshare.tensors import layout
from computeshare.tensors.layout import Layout
from computeshare.types import Vector
from tests.support.job_reducer import Job, spec_of
from tests.support.rounds import take_seat

FIELDS: dict[str, Any] = {"strategy": {"kind": "gossip", "every": 2, "buffer": 2}, "rounds": 6}
FIELDS |= {"optimizer": {"name": "SGD", "lr": 1.0}, "codec": {"up": "float32"}}
SPEC = spec_of(**FIELDS)
RNG = np.random.default_rng(5)


class Peer:
    """A worker that publishes what a test gives it."""

    def __init__(self, job: Job, worker: str) -> None:
        self.layout: Layout = task_of(SPEC).instance(0, "train", job.root).layout
        self.session = WorkerSession(job.redis, job.job_id, worker, f"session of {worker}")
        take_seat(self.session)
        self.token, self.reference = "", np.empty(0, np.float32)

    def load(self) -> Grant:
        """Take the current version as the reference; returns a lease."""
        parts, grant = self.session.pull(self.session.lease("").token, weights_parts(self.layout))
        assert parts is not None
        self.token, self.reference = grant.token, decode_weights(EXACT, parts, self.layout).parameters.copy()
        return grant

    def publish(self, grant: Grant, weights: Vector) -> str:
        assert len(grant.micro_batches) == 1, "weights are published after each unit"
        message = encode_update(EXACT, self.reference - weights, np.zeros(0, np.float32), self.layout, 0)
        updates = [(grant.micro_batches[0], message, 0.5)]
        return self.session.submit(grant.token, uuid.uuid4().hex, updates, {}).outcome


@pytest.fixture
def job(start: Callable[..., Job]) -> Job:
    return start(**FIELDS)


def some_weights(peer: Peer) -> Vector:
    return RNG.normal(size=peer.layout.parameters).astype(np.float32)


def versions(job: Job) -> list[dict[str, Any]]:
    events: Any = job.redis.xrange(job.store.keys.events())
    return [json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"version"]


def published(job: Job, peer: Peer) -> Vector:
    peer.load()
    return peer.reference


@pytest.mark.parametrize("buckets", [1, 4])
def test_a_version_is_the_mean_of_each_peers_newest_weights(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, buckets: int
) -> None:
    if buckets > 1:
        monkeypatch.setattr(layout, "BUCKET", 5000)
    job = start(**FIELDS)
    a, b = Peer(job, "a"), Peer(job, "b")
    mine, its = some_weights(a), some_weights(b)
    assert len(a.layout.buckets) == buckets
    assert [a.publish(a.load(), mine), b.publish(b.load(), its)] == ["accepted", "accepted"]
    job.reducer.advance()
    assert published(job, a) == pytest.approx((mine + its) / 2, abs=1e-5)
    distance = np.sqrt(np.mean(np.square((mine - its) / 2, dtype=float)))
    assert versions(job)[0]["consensus"] == pytest.approx(distance, rel=1e-4)

    newest = some_weights(a)
    a.publish(a.load(), some_weights(a))
    a.publish(a.load(), newest)
    job.reducer.advance()
    assert published(job, a) == pytest.approx((newest + its) / 2, abs=1e-5), "of a its last, and of b what it has sent"
    distance = np.sqrt(np.mean(np.square((newest - its) / 2, dtype=float)))
    assert versions(job)[1]["consensus"] == pytest.approx(distance, rel=1e-4)
    assert {worker for _, worker, _ in versions(job)[1]["counted"]} == {"a"}

    b.session.leave("goes")
    for _ in range(2):
        a.publish(a.load(), newest)
    job.reducer.advance()
    assert published(job, a) == pytest.approx(newest, abs=1e-5), "b is not there any more"
    assert versions(job)[2]["consensus"] == 0


def test_a_peer_that_has_published_nothing_for_too_long_is_left_out(job: Job) -> None:
    a, b = Peer(job, "a"), Peer(job, "b")
    its = some_weights(b)
    b.publish(b.load(), its)
    a.publish(a.load(), some_weights(a))
    job.reducer.advance()
    for counts in (True, True, False):
        mine = some_weights(a)
        for _ in range(2):
            a.publish(a.load(), mine)
        job.reducer.advance()
        expected = (mine + its) / 2 if counts else mine
        assert published(job, a) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("wrong", ["not finite", "truncated", "too long", "entry", "gone", None])
def test_weights_whose_unit_has_not_counted_yet_are_taken_if_they_are_valid(job: Job, wrong: str | None) -> None:
    other, good = Peer(job, "other"), Peer(job, "good")
    for _ in range(2):
        mine = some_weights(good)
        good.publish(good.load(), mine)
    peers, peer = job.store.keys.peers(), job.store.keys.peer("other")
    difference = np.full(other.layout.parameters, np.nan if wrong == "not finite" else 1, np.float32)
    message = encode_update(EXACT, difference, np.zeros(0, np.float32), other.layout, 0)
    parts = {str(index): bytes(part) for index, part in enumerate(message)}
    if wrong == "truncated":
        del parts["1"]
    elif wrong == "too long":
        parts["1"] = bytes(9_000_000)
    job.redis.hset(peers, "other", "x" if wrong == "entry" else f"{good.token}|1|0.5|1")
    if wrong != "gone":
        job.redis.hset(peer, mapping=parts)
    job.reducer.advance()
    expected = mine if wrong else (mine + good.reference - 1) / 2
    assert published(job, good) == pytest.approx(expected, abs=1e-5)
    assert job.redis.hexists(peers, "other") and not job.redis.exists(job.store.keys.strikes())


def test_a_peer_with_an_older_reference_counts_as_it_is(job: Job) -> None:
    slow, fast = Peer(job, "slow"), Peer(job, "fast")
    lease = slow.load()
    for _ in range(2):
        fast.publish(fast.load(), some_weights(fast))
    job.reducer.advance()
    mine, its = some_weights(slow), some_weights(fast)
    assert slow.publish(lease, mine) == "accepted"
    fast.publish(fast.load(), its)
    job.reducer.advance()
    assert versions(job)[1]["staleness"] in ([1, 0], [0, 1])
    assert published(job, fast) == pytest.approx((mine + its) / 2, abs=1e-5)


def test_a_reducer_that_takes_over_finds_the_reference_of_peers_one_version_behind(job: Job) -> None:
    slow, slower, fast = Peer(job, "slow"), Peer(job, "slower"), Peer(job, "fast")
    leases, its = [slow.load(), slower.load()], some_weights(fast)
    for _ in range(2):
        fast.publish(fast.load(), its)
    job.reducer.advance()
    job.reducer = job.new_reducer()
    mine = [some_weights(slow), some_weights(slower)]
    assert [slow.publish(leases[0], mine[0]), slower.publish(leases[1], mine[1])] == ["accepted", "accepted"]
    job.reducer.advance()
    assert published(job, fast) == pytest.approx((sum(mine) + its) / 3, abs=1e-5)


@pytest.mark.parametrize("stays", [True, False])
def test_a_reducer_that_takes_over_leaves_out_peers_whose_reference_is_gone(job: Job, stays: bool) -> None:
    slow, slower, fast = Peer(job, "slow"), Peer(job, "slower"), Peer(job, "fast")
    leases, its = [slow.load(), slower.load()], some_weights(fast)
    for _ in range(2):
        its = some_weights(fast)
        for _ in range(2):
            fast.publish(fast.load(), its)
        job.reducer.advance()
    before = published(job, fast)
    if not stays:
        fast.session.leave("goes")
    job.reducer = job.new_reducer()
    for peer, lease in zip((slow, slower), leases, strict=True):
        assert peer.publish(lease, some_weights(peer)) == "accepted"
    job.reducer.advance()
    assert versions(job)[2]["staleness"] == [2, 2]
    assert published(job, slow) == pytest.approx(its if stays else before, abs=1e-5), "nothing is counted as if fresh"
    assert {worker for _, worker, _ in versions(job)[2]["counted"]} == {"slow", "slower"}, "the units count"


def test_others_read_a_peers_newest_weights_until_it_leaves(
    job: Job, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Peer(job, "a"), Peer(job, "b")
    board = PeerWeights.of_job(redis, job.job_id, "b")
    assert board.others() == {} and board.read("a", update_parts(a.layout)) is None
    for _ in range(3):
        mine = some_weights(a)
        a.publish(a.load(), mine)
        job.reducer.advance()
    ((name, known),) = board.others().items()
    assert (name, known.units, known.loss, known.token) == ("a", 3, 0.5, a.token)
    found = board.read("a", update_parts(a.layout))
    assert found is not None
    difference, _ = decode_update(EXACT, found[1], a.layout)
    assert a.reference - difference == pytest.approx(mine, abs=1e-5)
    lease = a.load()
    a.session.leave("goes")
    assert a.publish(lease, mine) == "fenced"
    assert {*board.others()} == {"a"}, "the list is not read again at once"
    assert board.read("a", update_parts(a.layout)) is None
    monkeypatch.setattr(peer_weights, "LISTED_S", 0)
    assert board.others() == {} == PeerWeights.of_job(redis, job.job_id, "a").others()
    assert b.publish(b.load(), mine) == "accepted"


def test_a_banned_peer_is_read_by_nobody(job: Job, redis: Redis) -> None:
    bad, good = Peer(job, "bad"), Peer(job, "good")
    good.load()
    for _ in range(5):
        while (lease := bad.load()).micro_batches:
            bad.publish(lease, np.full(bad.layout.parameters, np.nan, np.float32))
        assert "bad" in PeerWeights.of_job(redis, job.job_id, "good").others()
        job.reducer.advance()
    assert redis.hexists(job.store.keys.banned(), "bad")
    assert PeerWeights.of_job(redis, job.job_id, "good").others() == {}


def test_a_state_that_was_not_stored_is_found_in_the_weights_themselves(job: Job, redis: Redis) -> None:
    a = Peer(job, "a")
    for _ in range(2):
        a.publish(a.load(), some_weights(a))
    job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.base is not None
    redis.delete(job.store.keys.state(str(state.token)))
    redis.hset(job.store.keys.state(str(state.base)), "0", b"kept until the next is stored")
    redis.rpush(job.store.keys.steps(), f"{state.base}|0,1|")
    job.reducer = job.new_reducer()
    mine = some_weights(a)
    for _ in range(2):
        assert a.publish(a.load(), mine) == "accepted"
    job.reducer.advance()
    assert published(job, a) == pytest.approx(mine, abs=1e-5)
