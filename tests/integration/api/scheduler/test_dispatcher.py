"""The level-triggered loop against a real broker; workers are registrations and what RQ would write for them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from sqlalchemy import insert, select, update

from api.database import Database
from api.jobs import service
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.publication import outbox
from api.publication.admission import BASE_BYTES, BrokerMemory
from api.publication.outbox import OUTBOX
from api.scheduler import dispatcher as dispatcher_module
from api.scheduler.dispatcher import PLACING_MS, Dispatcher
from api.scheduler.machines import INVITE
from api.stored_specs import spec_of
from api.tables import JOB, WORKER, CheckpointRow, Event, table
from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat, SeatQueue, unregister
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import Feed, token
from tests.support.scheduling_clock import Clock, Killed, dying, online, queued, seats, set_rq_status


def test_job_is_published_and_its_seats_handed_out(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str]
) -> None:
    workers = sorted(online(redis, queue) for _ in range(2))
    job = create()
    dispatcher.step(redis)
    spec = RoundStore(redis, job).spec()
    assert spec is not None and JobSpec.model_validate_json(spec).queue == queue
    assert redis.sismember(keys.JOBS, job)
    issued = seats(database, "issued")
    assert [(s.worker, s.number, s.attempt) for s in issued] == [(workers[0], 1, 1), (workers[1], 2, 1)]
    assert [queued(redis, w) for w in workers] == [[s.id] for s in issued]
    dispatcher.step(redis)
    assert len(seats(database)) == 2


def test_a_turn_costs_the_broker_no_more_for_jobs_that_wait(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    workers = [online(redis, queue) for _ in range(3)]

    def commands() -> int:
        for _ in range(3):  # until all workers have seats and every reason is told
            dispatcher.step(redis)
            for seat in seats(database, "issued"):
                set_rq_status(redis, seat.id, "started")
                online(redis, queue, seat.id, seat.worker)
            clock.ms += 1000
        before = redis.info("stats")["total_commands_processed"]
        dispatcher.step(redis)
        return int(redis.info("stats")["total_commands_processed"] - before)

    for _ in range(10):
        create(workers={"min": 1, "max": 1})
    few = commands()
    assert sorted(seat.worker for seat in seats(database, "issued")) == sorted(workers)
    for _ in range(60):
        create(workers={"min": 1, "max": 1})
    assert commands() <= few


def test_a_machine_at_the_gateway_gets_seats_of_its_invites_queue_only(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str]
) -> None:
    row = {"digest": "d", "created_ms": 1, "expires_ms": 1, "used_ms": 1, "worker": "mac", "gateway": True}
    with database.writing() as connection:
        connection.execute(insert(INVITE), row | {"id": "1a2b3c4d", "queue": "another"})
    worker, job = online(redis, queue, worker="1a2b3c4dwork"), create()
    dispatcher.step(redis)
    assert seats(database) == []
    with database.writing() as connection:
        connection.execute(update(INVITE).values(queue=queue))
    dispatcher.step(redis)
    assert [(seat.worker, seat.job_id) for seat in seats(database)] == [(worker, job)]


def test_a_job_that_this_release_cannot_read_keeps_no_other_waiting(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, database: Database, queue: str, create: Callable[..., str]
) -> None:
    online(redis, queue)
    unreadable, job = create(), create()
    with database.writing() as connection:
        spec = connection.scalar(select(JOB.c.spec).where(JOB.c.id == unreadable))
        connection.execute(update(JOB).where(JOB.c.id == unreadable).values(spec=spec | {"label_smoothing": 2}))
    for _ in range(2):
        dispatcher.step(redis)
    assert [seat.job_id for seat in seats(database, "issued")] == [job]
    shown = jobs.show(unreadable)
    why = shown.reason
    assert (
        shown.reason_code == "unreadable"
        and why
        and why.startswith("This release cannot read the job's specification (label_smoothing: ")
    )
    assert jobs.cancel(unreadable).status == "cancelled"
    dispatcher.step(redis)


def test_reason_says_what_is_missing_until_it_is_there(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    job = create(workers={"min": 2, "max": 4})
    online(redis, queue)
    dispatcher.step(redis)
    assert jobs.show(job).reason == f"Needs 2 workers on queue {queue}, 1 is online"
    assert seats(dispatcher._database) == []
    online(redis, queue)
    dispatcher.step(redis)
    assert len(seats(dispatcher._database)) == 2
    clock.ms += 30_000
    dispatcher.step(redis)
    assert "computeshare-reducer" in str(jobs.show(job).reason)
    redis.set(JobKeys(job).reducer(), "1|host|1|id")
    dispatcher.step(redis)
    assert jobs.show(job).reason == "A reducer is preparing the first weights"
    redis.hset(JobKeys(job).round(), "status", "running")
    dispatcher.step(redis)
    assert jobs.show(job).reason == "Workers are loading the model and the data"


def test_seat_of_a_worker_that_dies_goes_to_another(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    dead = online(redis, queue)
    job = create()
    dispatcher.step(redis)
    first = seats(database)[0]
    set_rq_status(redis, first.id, "started")
    unregister(redis, dead)
    other = online(redis, queue)
    clock.ms += 2000
    dispatcher.step(redis)
    states = {s.worker: (s.state, s.number, s.attempt) for s in seats(database)}
    assert states == {dead: ("lost", 1, 1), other: ("issued", 1, 2)}
    assert [s.job_id for s in seats(database)] == [job, job]


def test_a_worker_is_not_left_out_because_the_broker_keeps_losing_its_job(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    online(redis, queue)
    job = create()
    dispatcher.step(redis)
    with database.writing() as connection:
        connection.execute(update(JOB).where(JOB.c.id == job).values(status="running", started_ms=clock.ms))
    for attempt in range(1, 8):
        seat = seats(database, "issued")[0]
        assert seat.attempt == attempt
        set_rq_status(redis, seat.id, "finished")  # the worker finds its job gone
        RoundStore(redis, job).purge()
        clock.ms += 1000
        for _ in range(2):  # the seat is closed; its worker gets the next
            dispatcher.step(redis)


def joined(redis: Redis, job: str) -> Feed:
    """Events of a job in which the worker deadbeef0000 takes part."""
    feed = Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan)
    feed.open()
    feed.join("deadbeef0000")
    return feed


def test_worker_that_died_is_taken_out_of_the_job_and_hands_its_leases_back(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, queue: str, create: Callable[..., str]
) -> None:
    job = create()
    dispatcher.step(redis)
    joined(redis, job)
    redis.hset(JobKeys(job).round(), mapping={"status": "running", "version": 0})
    redis.hset(JobKeys(job).sessions(), "deadbeef0000", "s1")
    redis.hset(JobKeys(job).leases(), "3", "s1|99|1|deadbeef0000|1")
    Projector(database).step(redis)
    assert jobs.show(job).workers == 1
    dispatcher.step(redis)
    assert jobs.show(job).workers == 0
    assert redis.hlen(JobKeys(job).leases()) == 0
    assert redis.lrange(JobKeys(job).free(), 0, -1) == [b"3"]


def test_a_model_whose_stages_its_workers_cannot_hold_says_so(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    worker = online(redis, queue)
    codec = {"up": "float32", "down": "float32"}
    job = create(strategy={"kind": "pipeline"}, codec=codec, workers={"min": 1, "max": 1})
    dispatcher.step(redis)
    feed = Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan)
    feed.open()
    feed.send("split", stages=[{"layers": [name], "parameters": 1} for name in "ab"])
    feed.join(worker)
    redis.hset(JobKeys(job).round(), mapping={"status": "running", "version": 0})

    def told(after_ms: int, *chain: dict[str, Any]) -> str | None:
        if chain:
            feed.send("placed", number=1, chains=[list(chain)])
        Projector(database).step(redis)
        with database.writing() as connection:
            connection.execute(update(WORKER).where(WORKER.c.job_id == job).values(joined_ms=clock.ms - after_ms))
        dispatcher.step(redis)
        return jobs.show(job).reason_code

    assert told(PLACING_MS - 1) != "stages", "they may still look for a placement"
    assert told(PLACING_MS + 1) == "stages"
    assert "--max-memory" in str(jobs.show(job).reason)
    assert told(PLACING_MS + 1, {"worker": worker, "first": 0, "stop": 2}) != "stages"


def test_a_goodbye_read_after_its_worker_was_taken_for_dead_is_what_stands(
    redis: Redis, dispatcher: Dispatcher, database: Database, history: History, create: Callable[..., str]
) -> None:
    job = create()
    dispatcher.step(redis)
    feed = joined(redis, job)
    Projector(database).step(redis)
    feed.send("left", worker="deadbeef0000", session="s1", reason="asked to leave at once", freed=[])
    dispatcher.step(redis)
    (gone,) = history.workers(job).items
    assert (gone.active, gone.left_reason) == (False, "not heard of any more")
    Projector(database).step(redis)
    (gone,) = history.workers(job).items
    assert (gone.active, gone.left_reason) == (False, "asked to leave at once")


def test_nobody_is_taken_for_dead_just_after_an_outage(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    worker = online(redis, queue)
    job = create()
    dispatcher.step(redis)
    feed = Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan)
    feed.open()
    feed.join(worker)
    Projector(database).step(redis)
    seat = seats(database)[0]
    set_rq_status(redis, seat.id, "started")
    unregister(redis, worker)
    clock.ms += 30_000  # the broker, or this machine, was away that long
    for _ in range(5):
        dispatcher.step(redis)
        clock.ms += 2000
    assert [s.state for s in seats(database)] == ["issued"]
    assert jobs.show(job).workers == 1
    online(redis, queue, seat.id, worker)
    for _ in range(5):
        dispatcher.step(redis)
        clock.ms += 2000
    assert [s.state for s in seats(database)] == ["issued"]


def test_everything_is_issued_again_when_the_broker_comes_back_empty(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    worker = online(redis, queue)
    job = create()
    dispatcher.step(redis)
    redis.delete(f"rq:job:{worker}-{job}-1-1", f"rq:queue:{worker}", JobKeys(job).spec())
    redis.srem(keys.JOBS, job)
    for _ in range(3):
        clock.ms += 2000
        dispatcher.step(redis)
    assert RoundStore(redis, job).spec() is not None and redis.sismember(keys.JOBS, job)
    assert [(s.state, s.attempt) for s in seats(database)] == [("lost", 1), ("issued", 2)]
    assert queued(redis, worker) == [f"{worker}-{job}-1-2"]


def test_seat_that_keeps_failing_is_retried_ever_more_slowly(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    worker = online(redis, queue)
    create()
    for _ in range(60):  # a minute
        dispatcher.step(redis)
        for seat in seats(database, "issued"):
            set_rq_status(redis, seat.id, "failed")
        online(redis, queue, worker=worker)
        clock.ms += 1000
    assert 4 <= len(seats(database)) <= 8


def test_cancel_ends_the_rounds_and_stops_the_seats(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    busy, idle = sorted(online(redis, queue) for _ in range(2))
    job = create()
    dispatcher.step(redis)
    running, waiting = seats(database)
    set_rq_status(redis, running.id, "started")
    redis.lrem(f"rq:queue:{busy}", 0, running.id)
    online(redis, queue, running.id, busy)
    redis.hset(JobKeys(job).round(), "status", "running")
    jobs.cancel(job)
    dispatcher.step(redis)
    assert RoundStore(redis, job).status() == "cancelled"
    assert not redis.sismember(keys.JOBS, job)
    assert [s.state for s in seats(database)] == ["issued", "stopped"]
    assert queued(redis, idle) == []
    assert not redis.exists(f"rq:job:{waiting.id}")
    set_rq_status(redis, running.id, "finished")  # it left by itself
    clock.ms += 2000
    assert redis.hkeys(JobKeys(job).seats()) == [busy.encode()]
    dispatcher.step(redis)
    assert [s.state for s in seats(database)] == ["finished", "stopped"]
    dispatcher.step(redis)
    assert not redis.exists(JobKeys(job).seats())


def test_a_seat_that_has_ended_does_not_take_a_later_one_with_it(redis: Redis, create: Callable[..., str]) -> None:
    job, queue = create(), SeatQueue(redis)
    earlier, later = Seat("aaaaaaaawork", job, 1, 1), Seat("aaaaaaaawork", job, 1, 2)
    for seat in (earlier, later):
        queue.enqueue(seat)
    queue.vacate(earlier)
    assert redis.hget(JobKeys(job).seats(), later.worker) == later.id.encode()
    queue.vacate(later)
    assert not redis.exists(JobKeys(job).seats())


def test_job_that_a_reducer_opens_after_it_was_cancelled_is_ended_again(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = create()
    dispatcher.step(redis)
    jobs.cancel(job)
    dispatcher.step(redis)
    redis.hset(JobKeys(job).round(), "status", "running")
    clock.ms += dispatcher_module.RECONCILE_MS + 1
    dispatcher.step(redis)
    assert RoundStore(redis, job).status() == "cancelled"


def test_keys_of_an_ended_job_are_deleted_once_its_events_are_stored(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = create()
    dispatcher.step(redis)
    Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan).open()
    jobs.cancel(job)

    def minutes(count: int) -> None:
        for _ in range(count * 12):
            clock.ms += 5001
            dispatcher.step(redis)

    minutes(2)
    assert redis.exists(JobKeys(job).events())  # not stored yet
    Projector(database).step(redis)
    minutes(1)
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []
    assert jobs.show(job).status == "cancelled"
    assert Projector(database)._positions() == {}


def test_deleting_removes_checkpoints_and_keys_even_late_ones(
    redis: Redis,
    dispatcher: Dispatcher,
    jobs: Jobs,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
) -> None:
    job = create()
    dispatcher.step(redis)
    folder = tmp_path / "artifacts" / job
    (folder / token(1)).mkdir(parents=True)
    jobs.cancel(job)
    jobs.delete(job)
    assert not folder.exists()
    dispatcher.step(redis)
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []
    (folder / token(2)).mkdir(parents=True)  # a reducer that was just writing
    redis.set(JobKeys(job).state(token(2)), "late")
    clock.ms += service.LATE_MS + 1
    dispatcher.step(redis)
    assert not folder.exists()
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []


def test_last_checkpoint_and_score_are_found_on_disk_when_their_events_were_lost(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    history: History,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
) -> None:
    job = create()
    dispatcher.step(redis)
    feed = Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan)
    feed.open()
    feed.join()
    feed.commit()
    feed.commit()
    Projector(database).step(redis)
    last = Token.parse(token(2))
    artifacts = Artifacts(tmp_path / "artifacts", job)
    write_checkpoint(artifacts, last, {"w": np.zeros(3, np.float32)}, b"state", "ab" * 32, 0, 8)
    clock.ms += dispatcher_module.RECONCILE_MS + 1
    dispatcher.step(redis)
    assert (jobs.show(job).status, jobs.show(job).durable_version) == ("running", 2)
    artifacts.save_score(last, {"loss": 0.25, "accuracy": 0.75, "samples": 360})
    clock.ms += dispatcher_module.RECONCILE_MS + 1
    dispatcher.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.accuracy, shown.best_version) == ("completed", 0.75, 2)
    assert [(c.version, c.sha256, c.best) for c in history.checkpoints(job).items] == [(2, "ab" * 32, True)]


def test_a_checkpoint_whose_files_were_removed_is_forgotten(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
) -> None:
    job = create()
    dispatcher.step(redis)
    feed = Feed(redis, job, JobSpec(dataset="digits", model="mlp").plan)
    feed.open()
    feed.join()
    artifacts = Artifacts(tmp_path / "artifacts", job)
    for version in (1, 2):
        feed.commit()
        write_checkpoint(artifacts, Token.parse(token(version)), {"w": np.zeros(3, np.float32)}, b"", "ab" * 32, 0, 8)
    Projector(database).step(redis)

    def known() -> list[int]:
        clock.ms += dispatcher_module.RECONCILE_MS + 1
        dispatcher.step(redis)
        rows = table(CheckpointRow).c
        with database.engine.connect() as connection:
            return sorted(connection.scalars(select(rows.version).where(rows.job_id == job)))

    assert known() == [1, 2]
    shutil.rmtree(artifacts.path(Token.parse(token(1))))
    assert known() == [2]
    assert jobs.show(job).durable_version == 2


def test_what_the_broker_refuses_is_the_reason_and_is_tried_again(
    redis: Redis,
    dispatcher: Dispatcher,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_arguments: object) -> None:
        raise ResponseError("OOM command not allowed when used memory > 'maxmemory'")

    online(redis, queue)
    job = create()
    with monkeypatch.context() as patch:
        patch.setattr(RoundStore, "publish", full)
        dispatcher.step(redis)
        assert str(jobs.show(job).reason).startswith("The broker refuses to store data: OOM")
    clock.ms += outbox.POSTPONED_MS + 1
    dispatcher.step(redis)
    assert jobs.show(job).reason == "A reducer is preparing the first weights"
    assert RoundStore(redis, job).spec() is not None


# Crash windows: the process dies at each step that leaves SQLite or the broker changed; then it starts again.


STEPS = [
    (RoundStore, "publish"),
    (SeatQueue, "enqueue"),
    (outbox.Courier, "_note"),
    (Dispatcher, "_publish"),
    (Dispatcher, "_write"),
    (Dispatcher, "_look_after"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{o.__name__}.{n}" for o, n in STEPS])
def test_death_at_any_step_loses_no_seat_and_doubles_none(
    owner: type,
    name: str,
    after: bool,
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = sorted(online(redis, queue) for _ in range(2))
    job = create()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), after))
        with pytest.raises(Killed):
            dispatcher.step(redis)
    restarted = Dispatcher(database, tmp_path / "artifacts")
    for _ in range(3):
        clock.ms += 1000
        restarted.step(redis)
    issued = seats(database)
    assert [(s.worker, s.number, s.attempt, s.state) for s in issued] == [
        (workers[0], 1, 1, "issued"),
        (workers[1], 2, 1, "issued"),
    ]
    assert [queued(redis, w) for w in workers] == [[s.id] for s in issued]
    assert RoundStore(redis, job).spec() is not None


ENDING = [
    (RoundStore, "end"),
    (SeatQueue, "stop"),
    (outbox.Courier, "_note"),
    (RoundStore, "purge"),
    (Artifacts, "delete"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), ENDING, ids=[f"{o.__name__}.{n}" for o, n in ENDING])
def test_death_while_a_job_is_cancelled_and_deleted_leaves_nothing_behind(
    owner: type,
    name: str,
    after: bool,
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = online(redis, queue)
    job = create()
    dispatcher.step(redis)
    redis.hset(JobKeys(job).round(), "status", "running")
    folder = tmp_path / "artifacts" / job
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_a, **_k: None)  # dies before it got there
        jobs.cancel(job)
        jobs.delete(job)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), after))
        with pytest.raises(Killed):
            dispatcher.step(redis)
    Dispatcher(database, tmp_path / "artifacts").step(redis)
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []
    assert not redis.sismember(keys.JOBS, job)
    assert queued(redis, worker) == []
    assert not folder.exists()


def test_outage_in_mid_delivery_leaves_the_rest_for_the_next_turn(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    queue: str,
    create: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(3):
        online(redis, queue)
    jobs_made = [create(workers={"min": 1, "max": 1}) for _ in range(3)]
    publish, calls = RoundStore.publish, []

    def away_after_one(self: RoundStore, *told: str) -> None:
        calls.append(self.job_id)
        if len(calls) > 1:
            raise RedisConnectionError("connection refused")
        publish(self, *told)

    with monkeypatch.context() as patch:
        patch.setattr(RoundStore, "publish", away_after_one)
        with pytest.raises(RedisConnectionError):
            dispatcher.step(redis)
    dispatcher.step(redis)
    assert all(RoundStore(redis, job).spec() for job in jobs_made)
    with database.engine.connect() as connection:
        assert connection.execute(select(OUTBOX).where(OUTBOX.c.done_ms.is_(None))).all() == []


def test_seat_whose_delivery_comes_after_its_job_was_deleted_is_not_handed_over(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    worker = online(redis, queue)
    job = create()
    dispatcher.step(redis)
    SeatQueue(redis).stop(Seat.parse(seats(database)[0].id))
    with database.writing() as connection:  # as if the broker had refused it, for want of memory
        late = {"done_ms": None, "due_ms": clock.ms + 5000}
        connection.execute(update(OUTBOX).where(OUTBOX.c.kind == "seat").values(late))
    jobs.cancel(job)
    jobs.delete(job)
    dispatcher.step(redis)
    clock.ms += 5001
    dispatcher.step(redis)
    assert queued(redis, worker) == []
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []


# What the broker is told of


def published(redis: Redis, job: str) -> bool:
    return bool(redis.sismember(keys.JOBS, job)) and RoundStore(redis, job).spec() is not None


@pytest.fixture
def room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker whose memory takes one job at a time."""
    needed = JobSpec(dataset="digits", model="mlp").broker_bytes
    limit = BrokerMemory(used_bytes=0, limit_bytes=BASE_BYTES + needed * 3 // 2)
    monkeypatch.setattr(BrokerMemory, "of", lambda _redis: limit)


@pytest.mark.usefixtures("room_for_one")
def test_a_job_that_nobody_can_serve_takes_no_room_from_one_with_idle_workers(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, database: Database, queue: str, create: Callable[..., str]
) -> None:
    unserved = create(queue=f"{queue}0")
    served = create()
    worker = online(redis, queue)
    dispatcher.step(redis)
    assert (published(redis, unserved), published(redis, served)) == (False, True)
    assert [(seat.job_id, seat.worker) for seat in seats(database)] == [(served, worker)]
    assert str(jobs.show(unserved).reason).startswith("Needs 1 worker")


@pytest.mark.usefixtures("room_for_one")
def test_a_job_whose_workers_went_before_it_began_gives_its_room_up_to_one_that_waits_for_it(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    first = create(queue=f"{queue}0")
    gone = online(redis, f"{queue}0")
    dispatcher.step(redis)
    assert published(redis, first)
    RoundStore(redis, first).append("opened", {})
    unregister(redis, gone)
    second, worker = create(), online(redis, queue)
    for _ in range(3):
        clock.ms += 1000
        dispatcher.step(redis)
    assert published(redis, first), "events that nobody has stored yet are not thrown away"
    redis.delete(JobKeys(first).events())
    redis.set(JobKeys(first).fence(), 3)
    for _ in range(3):
        clock.ms += 1000
        dispatcher.step(redis)
    assert (published(redis, first), published(redis, second)) == (False, True)
    assert redis.get(JobKeys(first).fence()) == b"3"
    assert [seat.worker for seat in seats(database, "issued")] == [worker]
    online(redis, f"{queue}0")
    Jobs(database, dispatcher._artifacts_dir).cancel(second)
    clock.ms += dispatcher_module.RETIRED_MS
    dispatcher.step(redis)
    assert published(redis, first)


def test_a_job_waits_with_its_workers_for_as_many_as_it_needs_before_the_broker_is_told(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    job = create(workers={"min": 2, "max": 4})
    online(redis, queue)
    clock.ms += 3_600_000
    dispatcher.step(redis)
    assert not published(redis, job) and jobs.show(job).reason == f"Needs 2 workers on queue {queue}, 1 is online"
    online(redis, queue)
    dispatcher.step(redis)
    assert published(redis, job)
    assert jobs.show(job).reason == "A reducer is preparing the first weights"  # though it was created long ago


def test_a_finished_job_says_why_its_last_version_has_no_score(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, database: Database, create: Callable[..., str]
) -> None:
    job = create(rounds=1)
    with database.writing() as connection:
        connection.execute(update(JOB).where(JOB.c.id == job).values(version=1))
        event = {"job_id": job, "type": "unscored", "at_ms": 1, "data": {"version": 1, "error": "IndexError: 2"}}
        connection.execute(insert(table(Event)).values(event))
    dispatcher.step(redis)
    why = jobs.show(job).reason
    assert why and "a version cannot be scored: IndexError: 2. It is tried again" in why


def test_a_job_whose_rounds_are_all_done_is_published_without_a_worker(
    redis: Redis, dispatcher: Dispatcher, database: Database, create: Callable[..., str]
) -> None:
    job = create()
    with database.writing() as connection:
        connection.execute(update(JOB).where(JOB.c.id == job).values(status="running", version=2))
    dispatcher.step(redis)
    assert published(redis, job)


def test_checkpoints_that_waited_for_their_scores_go_once_the_job_is_completed(
    redis: Redis, dispatcher: Dispatcher, database: Database, create: Callable[..., str], clock: Clock
) -> None:
    job = create(rounds=4, evaluate_every=1, keep={"last": 1, "best": 1})
    artifacts = Artifacts(dispatcher._artifacts_dir, job)
    with database.engine.connect() as connection:
        retention = Retention(artifacts, spec_of(connection.scalar(select(JOB.c.spec).where(JOB.c.id == job))))
    tokens = [Token(1, version, f"{version:016x}") for version in (1, 2, 3, 4)]
    for saved in tokens:
        write_checkpoint(artifacts, saved, {"w": np.zeros(1, np.float32)}, b"state", "ab" * 32, 0, 0)
        retention.prune(saved)
    assert artifacts.on_disk() == tokens
    for saved, accuracy in zip(tokens, (0.5, 0.9, 0.7, 0.8), strict=True):
        artifacts.save_score(saved, {"accuracy": accuracy, "loss": 1.0, "samples": 10})
    with database.writing() as connection:
        ended = {"status": "completed", "version": 4, "finished_ms": clock.ms, "incarnation": 1}
        connection.execute(update(JOB).where(JOB.c.id == job).values(ended))
        rows = [
            {
                "job_id": job,
                "version": t.version,
                "token": str(t),
                "incarnation": 1,
                "at_ms": 1,
                "sha256": "",
                "bytes": 1,
            }
            for t in tokens
        ]
        connection.execute(insert(table(CheckpointRow)), rows)
    clock.ms += dispatcher_module.RECONCILE_MS + 1
    dispatcher.step(redis)
    assert artifacts.on_disk() == [tokens[1], tokens[3]]
    with database.engine.connect() as connection:
        versions = connection.scalars(
            select(table(CheckpointRow).c.version).where(table(CheckpointRow).c.job_id == job)
        )
        assert list(versions) == [2, 4]
