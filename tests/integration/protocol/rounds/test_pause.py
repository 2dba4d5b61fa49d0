"""Pausing and resuming rounds, against a real server."""

import threading
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import ONE, ZERO, Join, commit, current, send, take_seat


def woken(store: RoundStore) -> list[dict[bytes, bytes]]:
    entries: Any = store.redis.xrange(store.keys.versions())
    return [fields for _, fields in entries]


def test_only_running_rounds_can_be_paused_and_only_paused_ones_resumed(
    store: RoundStore, reducer: ReducerSession
) -> None:
    assert not store.resume()
    assert store.pause() and store.status() == "paused"
    assert not store.pause()
    assert store.resume() and store.status() == "running"
    assert [fields.get(b"status") for fields in woken(store)] == [None, b"paused", b"running"]


@pytest.mark.parametrize("status", ["finished", "completed", "failed", "cancelled"])
def test_rounds_that_are_over_are_neither_paused_nor_resumed(
    store: RoundStore, reducer: ReducerSession, status: str
) -> None:
    store.redis.hset(store.keys.round(), "status", status)
    before = woken(store)
    assert not store.pause() and not store.resume()
    assert store.status() == status and woken(store) == before


def test_a_job_that_is_not_open_is_not_brought_to_life_by_pausing_or_resuming_it(store: RoundStore) -> None:
    assert not store.pause() and not store.resume()
    assert store.status() is None and not store.redis.exists(store.keys.round(), store.keys.versions())


def test_a_paused_round_gives_no_lease_and_takes_no_session_and_no_submission(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    session = join("one")
    granted = session.lease(str(ZERO)).micro_batches
    store.pause()
    assert session.lease(str(ZERO)).answer == "paused"
    assert send(session, ZERO, *granted) == "stale"
    assert take_seat(WorkerSession(redis, reducer.job_id, "two", "late")) == "paused"


def test_what_was_accepted_before_a_pause_counts_after_it(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    first, second = join("first"), join("second")
    done, open_ones = first.lease(str(ZERO)).micro_batches, second.lease(str(ZERO)).micro_batches
    assert (done, open_ones) == ((0, 1), (2, 3))
    assert send(first, ZERO, *done) == "accepted"
    store.pause()
    first.leave("the job is paused")
    second.leave("the job is paused")
    assert sorted(reducer.progress()[1]) == [0, 1]
    store.resume()
    third = join("third")
    assert sorted(third.lease(str(ZERO)).micro_batches) == [2, 3]
    assert send(third, ZERO, 2, 3, nonce="other") == "accepted"
    assert sorted(reducer.progress()[1]) == [0, 1, 2, 3]


def test_a_round_that_is_full_may_be_committed_while_paused_and_stays_paused(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    session = join("one")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches) == "accepted"
    store.pause()
    assert commit(reducer, ONE)
    after = store.read()
    assert after is not None and (after.status, after.version) == ("paused", 1)


def test_pausing_wakes_a_worker_that_waits(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    session = join("one")
    answers: list[str] = []

    def wait() -> None:
        session.wait(10_000)
        answers.append(session.lease(str(ZERO)).answer)

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.pause()
    waiting.join(timeout=3)
    assert not waiting.is_alive() and answers == ["paused"]


def test_pauses_and_resumptions_at_the_same_time_take_turns(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    done: list[str] = []

    def change(pausing: bool) -> None:
        mine = RoundStore(redis, store.job_id)
        for _ in range(50):
            if mine.pause() if pausing else mine.resume():
                done.append("pause" if pausing else "resume")

    threads = [threading.Thread(target=change, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead = done.count("pause") - done.count("resume")
    assert done and store.status() == {0: "running", 1: "paused"}[ahead]


def test_the_time_that_a_round_was_paused_does_not_count_as_waiting(store: RoundStore, reducer: ReducerSession) -> None:
    before = current(reducer).opened_ms
    store.redis.hincrby(store.keys.round(), "opened", -3_600_000)
    store.pause()
    store.resume()
    assert current(reducer).opened_ms >= before
