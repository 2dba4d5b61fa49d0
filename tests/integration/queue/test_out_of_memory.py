"""A broker whose memory is full, for real: jobs, workers and reducers wait, say why, and go on by themselves."""

import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError

from api.database import Database
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.publication.admission import BASE_BYTES, BrokerMemory, exhausted, no_room
from api.scheduler.dispatcher import Dispatcher
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.queue import Seat, WorkerInfo, list_workers, register, roster
from computeshare.reducer.process import Reducer
from computeshare.settings import Settings
from computeshare.transport.connections import connect, when_there_is_room
from computeshare.up.embedded_broker import EmbeddedBroker
from computeshare.worker.seat.seat import SeatSession
from tests.support.rounds import PLAN, ZERO, events, take_seat
from tests.support.wait import wait_until

LIMIT = 24_000_000
MAC = WorkerInfo("aaaaaaaaaaaa", "mac", "cpu", (JobSpec(dataset="digits", model="mlp").queue,), {}, 1, "host", 1)
SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "micro_batch": 16, "threads": 1, "evaluate_every": 0}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Redis]:
    """A broker with little memory."""
    broker = EmbeddedBroker.start(tmp_path / "broker.log", maxmemory_bytes=LIMIT)
    client = connect(broker.url, retries=0)
    yield client
    client.close()
    broker.stop()


def fill(redis: Redis, ballast: list[str] | None = None) -> list[str]:
    """Take all the memory there is; returns the keys to delete, added to those of `ballast`."""
    ballast = [] if ballast is None else ballast
    for size in (50_000, 5_000, 500):
        try:
            while True:
                ballast.append(f"ballast:{len(ballast)}")
                redis.set(ballast[-1], bytes(size))
        except OutOfMemoryError:
            continue
    return ballast


def test_a_job_is_let_in_only_where_its_most_fits_beside_the_others() -> None:
    memory = BrokerMemory(used_bytes=50_000_000, limit_bytes=100_000_000)
    assert no_room(40_000_000, 0, memory) is None
    assert no_room(40_000_000, 0, BrokerMemory(90_000_000, 0)) is None  # no limit
    said = str(no_room(60_000_000, 0, memory))
    assert "60.0 MB" in said and "50.0 MB of 100 MB are free" in said and "raise its maxmemory" in said
    assert no_room(40_000_000, 60_000_000, memory) is not None  # promised, though not taken yet
    assert "smaller job" in str(no_room(100_000_000 - BASE_BYTES + 1, 0, memory))
    assert exhausted(memory) is None and "resumes once memory is free" in str(exhausted(BrokerMemory(100, 100)))


def test_the_estimate_covers_what_a_job_really_takes(small: Redis, tmp_path: Path) -> None:
    spec = JobSpec.model_validate({**SPEC, "rounds": 5, "optimizer": {"name": "Adam", "lr": 0.01}})
    before = BrokerMemory.of(small).used_bytes
    job_id = secrets.token_hex(4)
    RoundStore(small, job_id).publish(spec.model_dump_json())
    stop, peak = threading.Event(), 0
    threads = start(small, job_id, spec, tmp_path, stop)
    while RoundStore(small, job_id).status() != "finished":
        peak = max(peak, BrokerMemory.of(small).used_bytes)
    end(threads, stop)
    assert peak - before < spec.broker_bytes + BASE_BYTES


def test_a_job_waits_for_room_with_numbers_and_starts_by_itself(
    small: Redis, database: Database, jobs: Jobs, tmp_path: Path
) -> None:
    dispatcher = Dispatcher(database, tmp_path / "artifacts")
    job = jobs.create(JobSpec.model_validate({**SPEC, "rounds": 5})).id
    ballast = fill(small)
    dispatcher.step(small)
    shown = jobs.show(job)
    assert shown.status == "queued" and "of 24.0 MB are free" in str(shown.reason)
    assert RoundStore(small, job).spec() is None
    small.delete(*ballast)
    register(small, MAC)
    dispatcher.step(small)
    assert RoundStore(small, job).spec() is not None
    assert "preparing the first weights" in str(jobs.show(job).reason)


def test_a_job_that_never_fits_says_so_and_holds_up_no_smaller_one(
    small: Redis, database: Database, jobs: Jobs, tmp_path: Path
) -> None:
    dispatcher = Dispatcher(database, tmp_path / "artifacts")
    large = jobs.create(JobSpec(dataset="mnist", model="resnet18", input=(3, 32, 32), micro_batch=32, rounds=5)).id
    little = jobs.create(JobSpec.model_validate({**SPEC, "rounds": 5})).id
    register(small, MAC)
    dispatcher.step(small)
    assert "whose limit is 24.0 MB: raise the broker's maxmemory" in str(jobs.show(large).reason)
    assert RoundStore(small, large).spec() is None and RoundStore(small, little).spec() is not None


def test_a_submission_for_which_there_is_no_memory_leaves_no_trace(small: Redis, job_id: str) -> None:
    reducer = ReducerSession(small, job_id, "reducer")
    reducer.publish("{}")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ZERO, [b"weights"], [b"state"], PLAN.round(0), {"version": 0})
    session = WorkerSession(small, job_id, "worker", "session")
    take_seat(session)
    numbers = session.lease(str(ZERO)).micro_batches
    updates = [(m, [bytes(100_000)], 0.5) for m in numbers]
    ballast = fill(small)
    with pytest.raises(OutOfMemoryError):
        session.submit(str(ZERO), "nonce", updates, {})
    assert reducer.progress()[1] == {} and events(reducer, "submission") == []
    small.delete(*ballast)
    assert session.submit(str(ZERO), "nonce", updates, {}).outcome == "accepted"


def test_a_worker_stays_alive_while_there_is_no_memory_to_say_so(small: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerInfo("aaaaaaaaaaaa", "mac", "cpu", ("q",), {}, 1, "host", 1)
    register(small, worker)
    ballast = fill(small)
    monkeypatch.setattr(roster, "ALIVE_MS", 2_000)
    for _ in range(12):
        register(small, worker)
        time.sleep(0.25)  # the server's own clock
    assert [w.id for w in list_workers(small)] == [worker.id]
    small.delete(*ballast)


def test_pauses_grow_and_a_stop_ends_them() -> None:
    stop, calls = threading.Event(), []

    def call() -> None:
        calls.append(time.monotonic())
        if len(calls) == 4:
            stop.set()
        raise OutOfMemoryError("full")

    with pytest.raises(OutOfMemoryError):
        when_there_is_room(call, stop)
    gaps = [after - before for before, after in itertools.pairwise(calls)]
    assert len(calls) == 4 and gaps[0] >= 0.1 and gaps[2] >= 0.4


def start(
    redis: Redis, job_id: str, spec: JobSpec, root: Path, stop: threading.Event
) -> tuple[list[threading.Thread], list[Any]]:
    """A reducer and a seat, each in a thread; the list holds why the seat ended."""
    reducer = Reducer(redis, root, root / "bundles", stop)
    seat = Seat("aaaaaaaaaaaa", job_id, 1, 1)
    redis.hset(RoundStore(redis, job_id).keys.seats(), seat.worker, seat.id)
    session = SeatSession(redis, seat, spec, Settings(home=root), stop)
    ended: list[Any] = []
    targets = (reducer.run, lambda: ended.append(session.run("cpu")))
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads, ended


def end(started: tuple[list[threading.Thread], list[Any]], stop: threading.Event) -> None:
    stop.set()
    for thread in started[0]:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_job_in_mid_run_stands_still_and_goes_on_without_a_strike_or_a_lost_seat(
    small: Redis, database: Database, jobs: Jobs, tmp_path: Path
) -> None:
    spec = JobSpec.model_validate({**SPEC, "rounds": 400, "checkpoint_every": 0})
    job = jobs.create(spec).id
    register(small, MAC)
    dispatcher, projector = Dispatcher(database, tmp_path / "artifacts"), Projector(database)
    dispatcher.step(small)
    store, stop = RoundStore(small, job), threading.Event()
    started = start(small, job, spec, tmp_path / "artifacts", stop)
    try:
        wait_until(lambda: (state := store.read()) and state.version >= 10)
        ballast = fill(small)
        wait_until(lambda: fill(small, ballast) and still(store) and exhausted(BrokerMemory.of(small)))
        fill(small, ballast)
        dispatcher.step(small)
        assert "The broker is out of memory (2" in str(jobs.show(job).reason)
        before = store.read()
        assert before is not None and before.version < 400 and started[1] == []
        small.delete(*ballast)
        wait_until(lambda: store.status() == "finished")
        wait_until(lambda: Artifacts(tmp_path / "artifacts", job).tokens())
    finally:
        end(started, stop)
    projector.step(small)
    shown = jobs.show(job)
    assert (shown.version, shown.refused) == (400, 0)
    assert len(small.hgetall(store.keys.strikes())) == len(small.hgetall(store.keys.banned())) == 0  # type: ignore[arg-type]
    assert started[1] == ["the job is finished"]


def still(store: RoundStore) -> bool:
    """Whether no version comes for a while."""
    before = store.read()
    time.sleep(1.5)
    return store.read() == before
