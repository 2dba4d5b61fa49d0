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


def test_a_version_is_the_mean_of_each_peers_newest_weights(job: Job, redis: Redis) -> None:
    a, b = Peer(job, "a"), Peer(job, "b")
    mine, its = some_weights(a), some_weights(b)
    assert [a.publish(a.load(), mine), b.publish(b.load(), its)] == ["accepted", "accepted"]
    job.reducer.advance()
    assert published(job, a) == pytest.approx((mine + its) / 2, abs=1e-5)
    distance = np.sqrt(np.mean(np.square((mine - its) / 2, dtype=float)))
    assert versions(job)[0]["consensus"] == pytest.approx(distance, rel=1e-4)

    a.publish(a.load(), some_weights(a))
    a.publish(a.load(), mine)
    job.reducer.advance()
    assert published(job, a) == pytest.approx(mine, abs=1e-5), "what a peer published before is in its newest"
    assert versions(job)[1]["consensus"] == 0
    assert len(versions(job)[1]["counted"]) == 2


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


def test_a_reducer_that_takes_over_leaves_out_a_peer_whose_reference_it_does_not_have(job: Job) -> None:
    slow, fast = Peer(job, "slow"), Peer(job, "fast")
    lease = slow.load()
    for _ in range(2):
        fast.publish(fast.load(), some_weights(fast))
    job.reducer.advance()
    job.reducer = job.new_reducer()
    its = some_weights(fast)
    slow.publish(lease, some_weights(slow))
    fast.publish(fast.load(), its)
    job.reducer.advance()
    assert published(job, fast) == pytest.approx(its, abs=1e-5)
    assert {worker for _, worker, _ in versions(job)[1]["counted"]} == {"slow", "fast"}, "its unit counts all the same"


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
