"""What the scripts keep of a worker's newest published weights, for other workers to read."""

from typing import Any

import pytest
from redis import Redis

from computeshare.gossip.peer_weights import PeerWeights
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import BANNING_STRIKES
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import ZERO, Join, agree, know, parts, send


@pytest.fixture
def peers(store: RoundStore, reducer: ReducerSession, join: Join) -> tuple[WorkerSession, WorkerSession]:
    """Two workers of a job that publish after each unit."""
    both = join("one"), join("two")
    agree(store, peers=True)
    return both


def board(store: RoundStore, reader: str = "two") -> PeerWeights:
    return PeerWeights.of_job(store.redis, store.job_id, reader)


def test_a_lease_is_a_single_unit_however_fast_the_worker(
    store: RoundStore, peers: tuple[WorkerSession, WorkerSession]
) -> None:
    know(store, one=1.0)
    assert len(peers[0].lease(str(ZERO)).micro_batches) == 1


def test_an_accepted_update_is_also_the_workers_newest(
    redis: Redis, store: RoundStore, reducer: ReducerSession, peers: tuple[WorkerSession, WorkerSession]
) -> None:
    one, _ = peers
    for units in (1, 2):
        granted = one.lease(str(ZERO)).micro_batches
        assert send(one, ZERO, *granted, nonce=f"nonce {units}", blob=b"update %d" % units) == "accepted"
        (published,) = board(store).others().values()
        assert (published.token, published.units, published.loss) == (str(ZERO), units, 0.5)
        found = board(store).read("one", 1)
        assert found and found[1] == [b"update %d" % units]
    assert len(parts(reducer)) == 2, "the reducer's copies are its own"
    assert 0 < redis.ttl(store.keys.peer("one")) <= 600
    assert board(store, "one").others() == {}


def test_without_peers_nothing_is_kept(store: RoundStore, reducer: ReducerSession, join: Join) -> None:
    one = join("one")
    assert send(one, ZERO, *one.lease(str(ZERO)).micro_batches) == "accepted"
    assert board(store).others() == {} and board(store).read("one", 1) is None


def test_what_is_not_accepted_changes_nothing(store: RoundStore, peers: tuple[WorkerSession, WorkerSession]) -> None:
    one, _ = peers
    assert send(one, ZERO, *one.lease(str(ZERO)).micro_batches) == "accepted"
    assert send(one, ZERO, 3, nonce="without a lease", blob=b"other") == "lease_lost"
    published, message = board(store).read("one", 1) or (None, None)
    assert published and published.units == 1 and message == [b"update"]


def test_who_leaves_is_no_longer_a_peer(store: RoundStore, peers: tuple[WorkerSession, WorkerSession]) -> None:
    for worker in peers:
        send(worker, ZERO, *worker.lease(str(ZERO)).micro_batches, nonce=worker.worker_id)
    peers[0].leave("goes")
    assert board(store, "three").others().keys() == {"two"} and board(store).read("one", 1) is None


@pytest.mark.parametrize("how", ["at once", "by strikes"])
def test_who_is_banned_is_no_longer_a_peer(
    store: RoundStore, reducer: ReducerSession, peers: tuple[WorkerSession, WorkerSession], how: str
) -> None:
    one, _ = peers
    for strike in range(BANNING_STRIKES):
        send(one, ZERO, *one.lease(str(ZERO)).micro_batches, nonce=f"nonce {strike}")
        assert board(store).others().keys() == {"one"}
        if how == "at once":
            assert reducer.ban(ZERO, "one", "it lied")
            break
        (part,) = parts(reducer)
        reducer.refuse(ZERO, part, "wrong", "damaged")
    assert board(store).others() == {}


def test_a_discarded_round_takes_its_peers_along(
    redis: Redis, store: RoundStore, reducer: ReducerSession, peers: tuple[WorkerSession, WorkerSession]
) -> None:
    one, _ = peers
    send(one, ZERO, *one.lease(str(ZERO)).micro_batches)
    assert reducer.discard()
    left: Any = redis.keys(store.keys.pattern())
    assert not [key for key in left if b":peer" in key]
