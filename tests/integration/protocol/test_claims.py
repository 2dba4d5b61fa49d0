"""Reducers that serve whatever jobs there are: claims are let go once they are another's, outages survived."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.reducer import process
from computeshare.reducer.next_version import NextVersion
from computeshare.reducer.process import Reducer
from computeshare.reducer.round_handler import RoundHandler
from computeshare.transport.connections import connect
from computeshare.types import Blob, Token
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.job_reducer import Job, spec_of
from tests.support.reducer_process import running, version_of
from tests.support.rounds import events
from tests.support.wait import wait_until


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A broker of its own: a reducer serves every job there is."""
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    client = connect(broker.url, retries=0)
    yield client
    client.close()
    broker.stop()


def left_to_others(job: Job) -> Job:
    """A job that is open and has no reducer."""
    job.redis.delete(job.store.keys.reducer())
    return job


def test_a_reducer_whose_claim_was_taken_lets_the_job_go_and_keeps_the_others(
    redis: Redis, tmp_path: Path, job_id: str
) -> None:
    stores = [RoundStore(redis, f"{job_id}{number}") for number in range(2)]
    for store in stores:
        store.publish(spec_of().model_dump_json())
    with running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as reducer:
        wait_until(lambda: {store.job_id for store in stores} <= set(reducer.jobs))
        redis.set(stores[0].keys.reducer(), "another's", px=60_000)
        wait_until(lambda: stores[0].job_id not in reducer.jobs)
        assert stores[1].job_id in reducer.jobs
        redis.delete(stores[0].keys.reducer())
        wait_until(lambda: stores[0].job_id in reducer.jobs)  # nobody looks after it any more
        assert redis.pttl(stores[0].keys.reducer()) <= process.CLAIM_MS


def test_no_job_waits_for_the_step_of_another(redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = (left_to_others(Job(redis, name, spec_of(), tmp_path)) for name in ("slow", "quick"))
    step, is_stepping, may_go_on = NextVersion.step, threading.Event(), threading.Event()

    def stepped(self: NextVersion, *arguments: Any) -> Any:
        if self._session.job_id == "slow":
            is_stepping.set()
            assert may_go_on.wait(60)
        return step(self, *arguments)

    monkeypatch.setattr(NextVersion, "step", stepped)
    slow_hand, quick_hand = slow.hand("solo"), quick.hand("solo")
    with running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as reducer:
        wait_until(lambda: len(reducer.jobs) == 2)
        slow_hand.send(slow_hand.pull())
        assert is_stepping.wait(60)
        for version in (1, 2, 3):
            quick_hand.send(quick_hand.pull())
            wait_until(lambda version=version: version_of(quick.store) == version)
        assert version_of(slow.store) == 0
        may_go_on.set()
        wait_until(lambda: version_of(slow.store) == 1)


def test_jobs_are_spread_over_the_reducers_that_are_there(redis: Redis, tmp_path: Path) -> None:
    with (
        running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as first,
        running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as second,
    ):
        for number in range(4):
            RoundStore(redis, f"spread{number}").publish(spec_of().model_dump_json())
            wait_until(lambda number=number: len(first.jobs) + len(second.jobs) == number + 1)
        assert (len(first.jobs), len(second.jobs)) in ((2, 2), (1, 3), (3, 1))


def test_a_reducer_that_serves_others_leaves_a_job_to_one_that_serves_none(redis: Redis, tmp_path: Path) -> None:
    busy, idle = (Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event()) for _ in range(2))
    RoundStore(redis, "first").publish(spec_of().model_dump_json())
    busy.claim_jobs()
    RoundStore(redis, "second").publish(spec_of().model_dump_json())
    busy.claim_jobs()
    assert [*busy.jobs] == ["first"]
    idle.claim_jobs()
    assert [*idle.jobs] == ["second"]
    RoundStore(redis, "third").publish(spec_of().model_dump_json())
    wait_until(lambda: busy.claim_jobs() or "third" in busy.jobs)  # nobody else takes it
    for reducer in (busy, idle):
        reducer.stop.set()
        reducer.run()


def commands(redis: Redis) -> int:
    info: Any = redis.info("stats")
    return int(info["total_commands_processed"])


def test_standing_by_asks_about_a_claim_when_it_would_end(redis: Redis, tmp_path: Path) -> None:
    stores = [RoundStore(redis, f"held{number}") for number in range(100)]
    for store in stores:
        store.publish(spec_of().model_dump_json())
        redis.set(store.keys.reducer(), "another's", px=process.CLAIM_MS)
    reducer = Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())
    reducer.claim_jobs()
    before = commands(redis)
    for _ in range(4):  # a second of looking
        reducer.claim_jobs()
    assert commands(redis) - before < 20 and not reducer.jobs
    for store in stores:
        redis.pexpire(store.keys.reducer(), 1)
    reducer._asleep = dict.fromkeys(reducer._asleep, 0.0)  # the time is up
    wait_until(lambda: not redis.exists(stores[0].keys.reducer()))
    with running(reducer):
        wait_until(lambda: len(reducer.jobs) == 100)


def test_a_claim_given_up_is_taken_at_once(redis: Redis, tmp_path: Path) -> None:
    RoundStore(redis, "handed").publish(spec_of().model_dump_json())
    first, second = (Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event()) for _ in range(2))
    for reducer in (first, second):
        reducer.claim_jobs()
    assert [*first.jobs] == ["handed"] and not second.jobs
    first.stop.set()
    first.run()
    second.claim_jobs()
    assert [*second.jobs] == ["handed"]
    second.stop.set()
    second.run()


def away(*_: object) -> None:
    raise ConnectionError("the broker is away")


def test_an_outage_while_a_reducer_sleeps_costs_it_nothing_it_holds(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = left_to_others(Job(redis, "asleep", spec_of(), tmp_path))
    hand = job.hand("solo")
    with running(Reducer(job.redis, job.root, job.root / "bundles", threading.Event())) as reducer:
        wait_until(lambda: any(thread.job.handler and thread.job.handler.current for thread in reducer.jobs.values()))
        (held,) = reducer.jobs.values()
        version, looks = held.job.handler.current, list[None]()
        with monkeypatch.context() as patch:
            patch.setattr(ReducerSession, "look", lambda *_: (looks.append(None), away()))
            wait_until(lambda: len(looks) > 1)
            assert [*reducer.jobs.values()] == [held] and held.job.handler.current is version
        hand.send(hand.pull())
        wait_until(lambda: version_of(job.store) == 1)
        assert [*reducer.jobs.values()] == [held]


def test_a_claim_outlives_a_load_that_takes_many_times_as_long(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life_ms, load = 1000, ReducerSession.load_state
    monkeypatch.setattr(process, "CLAIM_MS", life_ms)
    monkeypatch.setattr(process, "RENEW_S", life_ms / 10_000)
    job = left_to_others(Job(redis, "heavy", spec_of(), tmp_path))

    def slow(self: ReducerSession, token: Token) -> Blob | None:
        time.sleep(5 * life_ms / 1000)
        return load(self, token)

    monkeypatch.setattr(ReducerSession, "load_state", slow)
    with (
        running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as first,
        running(Reducer(redis, tmp_path, tmp_path / "bundles", threading.Event())) as second,
    ):
        threads = lambda: [*first.jobs.values(), *second.jobs.values()]  # noqa: E731
        wait_until(lambda: any(thread.job.handler and thread.job.handler.current for thread in threads()))
        assert len(events(job.store, "reducer")) == 2  # the first of them is the test's own


def test_a_job_that_diverges_fails_in_plain_words_with_the_traceback_of_its_reducer(
    redis: Redis, tmp_path: Path
) -> None:
    spec = spec_of(optimizer={"name": "SGD", "lr": 1e8}, rounds=20)
    job = left_to_others(Job(redis, "wild", spec, tmp_path))
    hand = job.hand("solo")

    def failed() -> bool:
        grant = hand.pull()
        if grant.micro_batches:
            hand.send(grant)
        return bool(events(job.store, "failed"))

    with running(Reducer(job.redis, job.root, job.root / "bundles", threading.Event())):
        wait_until(failed)
    (told,) = events(job.store, "failed")
    assert told["error"].startswith("Training diverged at version")
    assert (
        told["detail"].startswith("Traceback (most recent call last)")
        and "Diverged: Training diverged at" in told["detail"]
    )


def test_a_fault_of_the_reducers_own_fails_its_job_with_its_traceback(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = left_to_others(Job(redis, "faulty", spec_of(), tmp_path))
    monkeypatch.setattr(RoundHandler, "resume", lambda self, state: 1 / 0)
    with running(Reducer(job.redis, job.root, job.root / "bundles", threading.Event())) as reducer:
        wait_until(lambda: events(job.store, "failed"))
        wait_until(lambda: not reducer.jobs)
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
    left_to_others(job)
    commit, outages = ReducerSession.commit, [away]

    def broken(self: ReducerSession, *arguments: Any) -> bool:
        if outages:
            outages.pop()()
        return commit(self, *arguments)

    monkeypatch.setattr(ReducerSession, "commit", broken)
    hand = job.hand("solo")
    with running(Reducer(job.redis, job.root, job.root / "bundles", threading.Event())):
        hand.send(hand.pull())
        wait_until(lambda: version_of(job.store) == 1)
    assert not outages and len(events(job.store, "reducer")) == 3  # the test's own, and one on each side of the outage
    job.reducer = job.new_reducer()
    assert job.finish(hand) == expected
