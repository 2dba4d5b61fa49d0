"""Reducers that serve whatever jobs there are: claims are let go once they are another's, outages survived."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opening import events
from redis import Redis
from redis.exceptions import ConnectionError
from test_reduction import Job, spec_of

from computeshare import reducer as reducer_module
from computeshare.broker import connect
from computeshare.embedded import EmbeddedBroker
from computeshare.reducer import Reducer
from computeshare.reduction import JobReducer
from computeshare.rounds import Claim, RoundStore
from computeshare.types import Blob, Token


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A broker of its own: a reducer serves every job there is."""
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    client = connect(broker.url, retries=0)
    yield client
    client.close()
    broker.stop()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)


def test_a_reducer_whose_claim_was_taken_lets_the_job_go_and_keeps_the_others(
    redis: Redis, tmp_path: Path, job_id: str
) -> None:
    stores = [RoundStore(redis, f"{job_id}{number}") for number in range(2)]
    for store in stores:
        store.publish(spec_of().model_dump_json())
    stop = threading.Event()
    reducer = Reducer(redis, tmp_path, stop)
    thread = threading.Thread(target=reducer.run, daemon=True)
    thread.start()
    try:
        until(lambda: {store.job_id for store in stores} <= set(reducer.jobs))
        redis.set(stores[0].keys.reducer(), "another's", px=60_000)
        until(lambda: stores[0].job_id not in reducer.jobs)
        assert stores[1].job_id in reducer.jobs
        redis.delete(stores[0].keys.reducer())
        until(lambda: stores[0].job_id in reducer.jobs)  # nobody looks after it any more
        assert redis.pttl(stores[0].keys.reducer()) <= reducer_module.CLAIM_MS
    finally:
        for store in stores:
            store.end("cancelled")
        stop.set()
        thread.join(20)
        for store in stores:
            store.purge()


def commands(redis: Redis) -> int:
    info: Any = redis.info("stats")
    return int(info["total_commands_processed"])


def test_standing_by_asks_about_a_claim_when_it_would_end(redis: Redis, tmp_path: Path) -> None:
    stores = [RoundStore(redis, f"held{number}") for number in range(100)]
    for store in stores:
        store.publish(spec_of().model_dump_json())
        redis.set(store.keys.reducer(), "another's", px=reducer_module.CLAIM_MS)
    reducer = Reducer(redis, tmp_path, threading.Event())
    reducer._claim_jobs()
    before = commands(redis)
    for _ in range(4):  # a second of looking
        reducer._claim_jobs()
    assert commands(redis) - before < 20 and not reducer.jobs
    for store in stores:
        redis.pexpire(store.keys.reducer(), 1)
    reducer._asleep = dict.fromkeys(reducer._asleep, 0.0)  # the time is up
    until(lambda: not redis.exists(stores[0].keys.reducer()))
    reducer._claim_jobs()
    assert len(reducer.jobs) == 100
    for job_id in list(reducer.jobs):
        reducer._release(job_id)


def test_a_claim_given_up_is_taken_at_once(redis: Redis, tmp_path: Path) -> None:
    RoundStore(redis, "handed").publish(spec_of().model_dump_json())
    first, second = (Reducer(redis, tmp_path, threading.Event()) for _ in range(2))
    for reducer in (first, second):
        reducer._claim_jobs()
    assert [*first.jobs] == ["handed"] and not second.jobs
    first._release("handed")
    second._claim_jobs()
    assert [*second.jobs] == ["handed"]
    second._release("handed")


def away(*_: object) -> None:
    raise ConnectionError("the broker is away")


def test_an_outage_while_a_reducer_sleeps_costs_it_nothing_it_holds(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(redis, "asleep", spec_of(), tmp_path)
    job.redis.delete(job.store.keys.reducer())
    reducer = Reducer(job.redis, job.root, threading.Event())
    reducer._turn()
    (held,) = reducer.jobs.values()
    version = held.current
    assert version is not None

    with monkeypatch.context() as patch:
        patch.setattr(Claim, "look", away)
        with pytest.raises(ConnectionError):
            reducer._turn()
    assert [*reducer.jobs.values()] == [held] and held.current is version
    hand = job.hand("solo")
    hand.send(hand.pull())
    reducer._turn()
    assert held.current is not None and held.current.token.version == 1


def test_a_claim_outlives_a_load_that_takes_many_times_as_long(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life_ms, load = 400, Claim.load_state
    monkeypatch.setattr(reducer_module, "CLAIM_MS", life_ms)
    monkeypatch.setattr(reducer_module, "RENEW_S", life_ms / 4000)
    job = Job(redis, "heavy", spec_of(), tmp_path)
    job.redis.delete(job.store.keys.reducer())

    def slow(self: Claim, token: Token) -> Blob | None:
        time.sleep(8 * life_ms / 1000)
        return load(self, token)

    monkeypatch.setattr(Claim, "load_state", slow)
    stop = threading.Event()
    reducers = [Reducer(redis, tmp_path, stop) for _ in range(2)]
    threads = [threading.Thread(target=reducer.run, daemon=True) for reducer in reducers]
    for thread in threads:
        thread.start()
    try:
        until(lambda: any(held.current for reducer in reducers for held in [*reducer.jobs.values()]))
        assert len(events(job.store, "reducer")) == 2  # the first of them is the test's own
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)


def test_a_job_that_diverges_fails_in_plain_words_with_the_traceback_of_its_reducer(
    redis: Redis, tmp_path: Path
) -> None:
    job = Job(redis, "wild", spec_of(optimizer={"name": "SGD", "lr": 1e8}, rounds=20), tmp_path)
    job.redis.delete(job.store.keys.reducer())
    reducer = Reducer(job.redis, job.root, threading.Event())
    reducer._turn()
    hand = job.hand("solo")
    while reducer.jobs:
        hand.send(hand.pull())
        reducer._turn()
    (told,) = events(job.store, "failed")
    assert told["error"].startswith("Training diverged at version")
    assert (
        told["detail"].startswith("Traceback (most recent call last)")
        and "Diverged: Training diverged at" in told["detail"]
    )


def test_a_fault_of_the_reducers_own_fails_its_job_with_its_traceback(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(redis, "faulty", spec_of(), tmp_path)
    job.redis.delete(job.store.keys.reducer())
    monkeypatch.setattr(JobReducer, "_resumed", lambda self, state: 1 / 0)
    Reducer(job.redis, job.root, threading.Event())._turn()
    (told,) = events(job.store, "failed")
    assert told["error"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in told["detail"]


def test_an_outage_in_the_middle_of_a_commit_changes_no_bit(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer has stepped in memory by then: going on with it would step twice."""
    whole, job = (Job(redis, name, spec_of(), tmp_path / name) for name in ("whole", "broken"))
    expected = whole.finish(whole.hand("solo"))
    whole.store.end("completed")
    job.redis.delete(job.store.keys.reducer())
    reducer = Reducer(job.redis, job.root, threading.Event())
    reducer._turn()
    hand = job.hand("solo")
    hand.send(hand.pull())

    with monkeypatch.context() as patch:
        patch.setattr(Claim, "commit", away)
        with pytest.raises(ConnectionError):
            for _ in range(3):
                reducer._turn()
    job.redis.delete(job.store.keys.reducer())  # the claim has run out
    reducer._looked, reducer._asleep = 0, {}
    for _ in range(3):
        reducer._turn()
    state = job.store.read()
    assert state is not None and state.version == 1
    job.reducer = job.new_reducer()
    assert job.finish(hand) == expected
