"""Weights that workers find damaged, and their publication again, against a real server."""

import pytest
from redis import Redis

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import ONE, ZERO, Join, commit, current, events, send

WHOLE = [b"whole weights"]


def test_a_session_that_doubts_weights_hands_its_leases_back(reducer: ReducerSession, join: Join) -> None:
    other, doubter = join("other", backup=False), join("doubter")
    kept, doubted = other.lease(str(ZERO)).micro_batches, doubter.lease(str(ZERO)).micro_batches
    assert kept and doubted
    doubter.doubt(str(ZERO), again=False)
    assert sorted(doubter.lease(str(ZERO)).micro_batches) == sorted(doubted)
    assert send(other, ZERO, *kept) == "accepted"
    assert not current(reducer).doubted and not reducer.redis.exists(reducer.keys.full())
    assert events(reducer, "doubted") == [{"token": str(ZERO), "version": 0, "worker": "doubter"}]


def test_a_second_doubt_asks_the_reducer_to_publish_again_once(reducer: ReducerSession, join: Join) -> None:
    doubter, other = join("doubter"), join("other")
    doubter.doubt(str(ZERO), again=True)
    assert current(reducer).doubted
    assert reducer.redis.lrange(reducer.keys.full(), 0, -1) == [str(ZERO).encode()]
    other.doubt(str(ZERO), again=True)
    assert [event["worker"] for event in events(reducer, "doubted")] == ["doubter"]


def test_a_worker_has_a_version_published_again_once(reducer: ReducerSession, join: Join) -> None:
    doubter, other = join("doubter"), join("other")

    def published_again(by: WorkerSession) -> bool:
        by.doubt(str(ZERO), again=False)
        by.doubt(str(ZERO), again=True)
        return current(reducer).doubted and reducer.republish(current(reducer), WHOLE, False)

    assert published_again(doubter)
    assert not published_again(doubter)
    assert published_again(other) and not published_again(other)
    assert [event["worker"] for event in events(reducer, "doubted")] == ["doubter"] * 2 + ["other"] * 2
    assert send(doubter, ZERO, *doubter.lease(str(ZERO)).micro_batches, nonce="one") == "accepted"
    assert send(other, ZERO, *other.lease(str(ZERO)).micro_batches, nonce="two") == "accepted"
    assert commit(reducer, ONE) and not reducer.redis.hexists(reducer.keys.round(), "doubters")


def test_a_doubt_of_an_older_version_or_by_an_older_session_changes_nothing(
    reducer: ReducerSession, join: Join
) -> None:
    before = join("a")
    after = join("a", "newer")
    granted = after.lease(str(ZERO)).micro_batches
    before.doubt(str(ZERO), again=True)
    after.doubt(str(ONE), again=True)
    assert send(after, ZERO, *granted) == "accepted"
    assert not current(reducer).doubted and events(reducer, "doubted") == []


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_weights_that_are_published_again_replace_the_damaged_weights(
    redis: Redis, reducer: ReducerSession, join: Join, is_snapshot: bool
) -> None:
    k, doubter = reducer.keys, join("doubter")
    doubter.doubt(str(ZERO), again=True)
    state = current(reducer)
    news = k.news(str(state.base))
    redis.hset(news, "0", b"damaged")
    redis.hset(k.round(), "snapshot", "older")
    assert reducer.republish(state, WHOLE, is_snapshot)
    assert doubter.pull(str(ZERO), 1)[0] == WHOLE and redis.ttl(k.weights(str(ZERO))) == -1
    assert not redis.exists(news) and not current(reducer).doubted
    assert redis.hget(k.round(), "snapshot") == (str(ZERO).encode() if is_snapshot else b"older")
    assert events(reducer, "republished") == [{"token": str(ZERO), "version": 0}]
    assert doubter.wait(1000) == str(ZERO)


def test_weights_of_an_older_version_or_by_an_older_reducer_are_not_published_again(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    first = current(reducer)
    session = join("a")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches) == "accepted"
    assert commit(reducer, ONE)
    assert not reducer.republish(first, WHOLE, False)
    assert reducer.renew(0)
    assert ReducerSession(redis, store.job_id, "second").claim("host", 2, 60_000)
    assert not reducer.republish(current(reducer), WHOLE, False)
    assert events(reducer, "republished") == []
