"""Pausing, resuming and retrying jobs: over REST, and what the dispatcher makes of it on a real broker."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.database import Database
from api.errors import Conflict
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.publication import outbox
from api.publication.outbox import OUTBOX
from api.scheduler import dispatcher as dispatcher_module
from api.scheduler.dispatcher import Dispatcher
from api.scheduler.seat_planner import LEAVE_MS
from api.tables import JOB
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import SeatQueue
from tests.support.event_stream import WORKERS, Feed, token
from tests.support.scheduling_clock import Clock, Killed, dying, online, queued, seats, set_rq_status

PROBLEM = "application/problem+json"
PLAN = JobSpec(dataset="digits", model="mlp").plan


def opened(redis: Redis, job: str, incarnation: int = 1, status: str = "running") -> None:
    """Open a job's rounds as a reducer would."""
    values = {"status": status, "token": token(0, incarnation), "base": "", "version": 0, "first": 0, "count": 4}
    redis.hset(JobKeys(job).round(), mapping={**values, "needed": 4, "cursor": 0})


def set_status(database: Database, job: str, **values: Any) -> None:
    with database.writing() as connection:
        connection.execute(update(JOB).where(JOB.c.id == job).values(values))


def lose(redis: Redis, job: str) -> None:
    """Forget a job, as a broker that comes back empty has."""
    RoundStore(redis, job).purge()


def known(redis: Redis, job: str) -> bool:
    return bool(redis.sismember(keys.JOBS, job)) or RoundStore(redis, job).spec() is not None


def turns(dispatcher: Dispatcher, redis: Redis, clock: Clock, count: int = 3) -> None:
    for _ in range(count):
        clock.ms += 1000
        dispatcher.step(redis)


# Over REST


@pytest.fixture
def job(client: TestClient) -> str:
    return str(client.post("/v1/jobs", json={"dataset": "digits", "model": "mlp", "queue": "nobody"}).json()["id"])


def test_pause_and_resume_answer_with_the_job_as_it_is_then(client: TestClient, job: str) -> None:
    paused = client.post(f"/v1/jobs/{job}/pause")
    assert (paused.status_code, paused.json()["status"], paused.json()["reason"]) == (
        202,
        "paused",
        "Paused by the owner",
    )
    assert paused.json()["paused_at"] is not None and paused.json()["reason_code"] == "user"
    assert [j["id"] for j in client.get("/v1/jobs?status=paused").json()["items"]] == [job]
    resumed = client.post(f"/v1/jobs/{job}/resume")
    assert (resumed.status_code, resumed.json()["status"], resumed.json()["paused_at"]) == (202, "queued", None)
    assert "Paused" not in resumed.json()["reason"]


ALLOWED = {"pause": {"queued", "running"}, "resume": {"paused"}, "retry": {"failed"}}


@pytest.mark.parametrize("status", ["queued", "running", "paused", "completed", "failed", "cancelled"])
@pytest.mark.parametrize("verb", ALLOWED)
def test_each_verb_is_taken_in_its_own_states_alone(jobs: Jobs, database: Database, verb: str, status: str) -> None:
    job = jobs.create(JobSpec(dataset="digits", model="mlp")).id
    set_status(database, job, status=status)
    before = jobs.show(job)
    if status in ALLOWED[verb]:
        assert getattr(jobs, verb)(job).status == ("paused" if verb == "pause" else "queued")
        return
    with pytest.raises(Conflict, match=f"is {status}"):
        getattr(jobs, verb)(job)
    assert jobs.show(job) == before


@pytest.mark.parametrize("verb", ALLOWED)
def test_a_refusal_is_a_problem(client: TestClient, job: str, verb: str) -> None:
    client.post(f"/v1/jobs/{job}/cancel")
    refused = client.post(f"/v1/jobs/{job}/{verb}")
    assert (refused.status_code, refused.headers["content-type"]) == (409, PROBLEM)
    assert "is cancelled" in refused.json()["detail"]
    assert client.post(f"/v1/jobs/nosuch00/{verb}").status_code == 404


def test_a_paused_job_can_be_cancelled_and_not_deleted(client: TestClient, job: str) -> None:
    client.post(f"/v1/jobs/{job}/pause")
    assert client.delete(f"/v1/jobs/{job}").status_code == 409
    cancelled = client.post(f"/v1/jobs/{job}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (202, "cancelled")
    assert (cancelled.json()["paused_at"], cancelled.json()["reason"]) == (None, "Cancelled by the owner")
    assert client.delete(f"/v1/jobs/{job}").status_code == 204


def test_a_resumed_job_does_not_ask_for_the_workers_that_were_missing_before(jobs: Jobs, database: Database) -> None:
    job = jobs.create(JobSpec(dataset="digits", model="mlp")).id
    set_status(database, job, reason="Needs 3 workers", reason_code="workers", missing_workers=3)
    jobs.pause(job)
    resumed = jobs.resume(job)
    assert (resumed.reason_code, resumed.missing_workers) == ("looking", 0)


def test_the_timeline_says_who_paused_resumed_and_retried(jobs: Jobs, database: Database, history: History) -> None:
    job = jobs.create(JobSpec(dataset="digits", model="mlp")).id
    jobs.pause(job)
    jobs.resume(job)
    set_status(database, job, status="failed")
    jobs.retry(job)
    told = [(event.type, event.data) for event in history.events(job, 0, 10)]
    who = {"by": "a user"}
    assert told[1:] == [("paused", who), ("resumed", who), ("retried", who)]


def test_a_pause_of_some_hours_ends_by_itself(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, history: History, create: Callable[..., str], clock: Clock
) -> None:
    job = create()
    ends = jobs.pause(job, hours=1.5).resume_at
    assert ends is not None and ends.timestamp() * 1000 == clock.ms + 5_400_000
    clock.ms += 5_399_000
    dispatcher.step(redis)
    assert jobs.show(job).status == "paused"
    turns(dispatcher, redis, clock, 1)
    assert (jobs.show(job).status, jobs.show(job).resume_at) == ("queued", None)
    assert [event.data for event in history.events(job) if event.type == "resumed"] == [{"by": "the clock"}]


def test_a_user_is_faster_than_the_clock(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = create()
    jobs.pause(job, hours=1)
    jobs.resume(job)
    jobs.pause(job)
    clock.ms += 3_600_001
    dispatcher.step(redis)
    assert (jobs.show(job).status, jobs.show(job).resume_at) == ("paused", None)


@pytest.mark.parametrize("hours", [0, -1, 1e9, "nan"])
def test_hours_are_checked(client: TestClient, job: str, hours: float | str) -> None:
    assert client.post(f"/v1/jobs/{job}/pause?hours={hours}").status_code == 422
    assert client.get(f"/v1/jobs/{job}").json()["status"] == "queued"


def test_the_time_that_a_job_was_stopped_is_told_apart(jobs: Jobs, database: Database, clock: Clock) -> None:
    job = jobs.create(JobSpec(dataset="digits", model="mlp")).id
    set_status(database, job, status="running", started_ms=clock.ms)
    clock.ms += 10_000
    jobs.pause(job)
    clock.ms += 60_000
    jobs.resume(job)
    assert jobs.show(job).stopped_s == 60
    set_status(database, job, status="failed", finished_ms=clock.ms)
    clock.ms += 5_000
    jobs.retry(job)
    jobs.pause(job)
    clock.ms += 1_000
    done = jobs.cancel(job)
    assert done.started_at and done.finished_at and done.stopped_s == 66
    assert (done.finished_at - done.started_at).total_seconds() - done.stopped_s == 10


# The rounds and the seats


def test_pausing_lets_the_seats_leave_and_hands_out_no_other(
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
    serving, waiting = seats(database)
    set_rq_status(redis, serving.id, "started")
    redis.lrem(f"rq:queue:{busy}", 0, serving.id)
    online(redis, queue, serving.id, busy)
    opened(redis, job)
    jobs.pause(job)
    dispatcher.step(redis)
    assert RoundStore(redis, job).status() == "paused"
    assert known(redis, job)
    assert [s.state for s in seats(database)] == ["issued", "stopped"]
    assert queued(redis, idle) == [] and not redis.exists(f"rq:job:{waiting.id}")
    set_rq_status(redis, serving.id, "finished")  # it left by itself
    online(redis, queue, None, busy)
    turns(dispatcher, redis, clock, 20)
    assert [s.state for s in seats(database)] == ["finished", "stopped"]
    assert jobs.show(job).reason == "Paused by a user"


def test_a_seat_that_does_not_leave_a_paused_job_is_stopped_after_its_grace(
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
    seat = seats(database)[0]
    set_rq_status(redis, seat.id, "started")
    online(redis, queue, seat.id, worker)
    jobs.pause(job)
    paused_ms = clock.ms
    while clock.ms < paused_ms + LEAVE_MS:
        dispatcher.step(redis)
        assert [s.state for s in seats(database)] == ["issued"]
        clock.ms += 1000
    clock.ms += 1
    dispatcher.step(redis)
    assert [s.state for s in seats(database)] == ["stopped"]


def test_resuming_lets_the_same_rounds_go_on_with_new_attempts(
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
    opened(redis, job)
    redis.hset(JobKeys(job).received(), "0", "{}")
    jobs.pause(job)
    turns(dispatcher, redis, clock)
    jobs.resume(job)
    turns(dispatcher, redis, clock)
    state = RoundStore(redis, job).read()
    assert state is not None and (state.status, str(state.token)) == ("running", token(0))
    assert redis.hlen(JobKeys(job).received()) == 1
    assert [(s.state, s.attempt) for s in seats(database)] == [("stopped", 1), ("issued", 2)]
    assert queued(redis, worker) == [f"{worker}-{job}-1-2"]


def test_a_job_paused_before_it_was_opened_is_paused_once_it_is(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    online(redis, queue)
    job = create()
    dispatcher.step(redis)
    jobs.pause(job)
    dispatcher.step(redis)
    opened(redis, job)
    turns(dispatcher, redis, clock, 1)
    assert RoundStore(redis, job).status() == "paused"


def test_rounds_that_somebody_paused_too_late_go_on(
    redis: Redis, dispatcher: Dispatcher, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    online(redis, queue)
    job = create()
    dispatcher.step(redis)
    opened(redis, job, status="paused")
    turns(dispatcher, redis, clock, 1)
    assert RoundStore(redis, job).status() == "running"


def test_a_broker_without_memory_for_a_pause_stops_no_other_job(
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
    dispatcher.step(redis)
    opened(redis, job)
    jobs.pause(job)
    other = create()
    with monkeypatch.context() as patch:
        patch.setattr(RoundStore, "pause", full)
        dispatcher.step(redis)
    assert known(redis, other)
    turns(dispatcher, redis, clock, 1)
    assert RoundStore(redis, job).status() == "paused"


def test_a_job_paused_before_it_was_published_is_published_when_it_is_resumed(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    online(redis, queue)
    job = create()
    jobs.pause(job)
    turns(dispatcher, redis, clock)
    assert not known(redis, job)
    jobs.resume(job)
    turns(dispatcher, redis, clock, 1)
    assert known(redis, job)


def test_a_paused_job_that_the_broker_lost_stays_paused_until_it_is_resumed(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    online(redis, queue)
    job = create()
    dispatcher.step(redis)
    jobs.pause(job)
    turns(dispatcher, redis, clock)
    lose(redis, job)
    restarted = Dispatcher(database, dispatcher._artifacts_dir)
    turns(restarted, redis, clock, 15)
    assert not known(redis, job) and jobs.show(job).status == "paused"
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []
    jobs.resume(job)
    turns(restarted, redis, clock, 1)
    assert known(redis, job) and jobs.show(job).status == "queued"


def test_a_worker_that_joins_late_does_not_wake_a_paused_job(
    redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create()
    feed = Feed(redis, job, PLAN)
    feed.open()
    jobs.pause(job)
    feed.join()
    Projector(database).step(redis)
    assert (jobs.show(job).status, jobs.show(job).started_at) == ("paused", None)


def under_way(redis: Redis, database: Database, job: str) -> Feed:
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join()
    feed.commit()
    Projector(database).step(redis)
    return feed


def test_a_job_whose_disk_is_full_is_paused_by_no_user(
    redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create(rounds=30)
    under_way(redis, database, job).send("held", reason="no space left on the disk")
    Projector(database).step(redis)
    held = jobs.show(job)
    assert (held.status, held.reason, held.reason_code) == ("paused", "Paused: no space left on the disk", "disk")
    assert jobs.resume(job).reason_code == "looking"
    set_status(database, job, status="running", reason="Needs 3 workers", reason_code="workers", missing_workers=3)
    set_status(database, job, status="paused")  # as earlier releases paused
    assert jobs.show(job).reason_code is None


def test_a_job_that_is_to_finish_its_round_pauses_with_the_next_version(
    redis: Redis, database: Database, jobs: Jobs, history: History, create: Callable[..., str]
) -> None:
    job = create(rounds=30)
    feed = under_way(redis, database, job)
    told = jobs.pause(job, after_round=True)
    assert (told.status, told.pause_after) == ("running", 2)
    feed.submit(5)
    Projector(database).step(redis)
    assert jobs.show(job).status == "running"
    opened(redis, job)
    feed.commit()
    Projector(database).step(redis)
    paused = jobs.show(job)
    assert (paused.status, paused.version, paused.pause_after) == ("paused", 2, None)
    assert (paused.reason, paused.reason_code) == ("Paused by a user, once the round was done", "user")
    assert RoundStore(redis, job).status() == "paused"
    assert [event.type for event in history.timeline(job, 2)] == ["paused", "pausing"]
    jobs.resume(job)
    feed.join()
    feed.commit()
    Projector(database).step(redis)
    assert jobs.show(job).status == "running"


def test_a_job_that_is_to_finish_its_round_goes_on_if_it_is_resumed_before(
    redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create(rounds=30)
    feed = under_way(redis, database, job)
    jobs.pause(job, after_round=True)
    resumed = jobs.resume(job)
    assert (resumed.status, resumed.pause_after) == ("running", None)
    feed.commit()
    Projector(database).step(redis)
    assert jobs.show(job).status == "running"
    with pytest.raises(Conflict):
        jobs.resume(job)


def test_the_last_round_of_all_completes_the_job_whatever_was_to_come_after_it(
    redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create(rounds=2)
    feed = under_way(redis, database, job)
    jobs.pause(job, after_round=True)
    feed.commit()
    feed.save()
    feed.score(0.5)
    Projector(database).step(redis)
    assert (jobs.show(job).status, jobs.show(job).pause_after) == ("completed", None)


def test_a_job_that_has_not_begun_has_no_round_to_finish(client: TestClient, job: str) -> None:
    assert client.post(f"/v1/jobs/{job}/pause?after=round").json()["status"] == "paused"
    assert client.post(f"/v1/jobs/{job}/pause?after=lunch").status_code == 422


def test_a_resumed_job_runs_once_a_worker_joins_and_keeps_when_it_began(
    redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create()
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join()
    Projector(database).step(redis)
    began = jobs.show(job).started_at
    jobs.pause(job)
    jobs.resume(job)
    assert jobs.show(job).status == "queued"
    feed.at_ms += 60_000
    feed.join(WORKERS[1])
    Projector(database).step(redis)
    assert (jobs.show(job).status, jobs.show(job).started_at) == ("running", began)


def test_what_was_decided_before_a_pause_is_neither_written_over_it_nor_carried_out(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause comes between the dispatcher's reading and its writing."""
    online(redis, queue)
    job = create()
    decide = Dispatcher._decide

    def decide_then_pause(self: Dispatcher, *arguments: Any) -> Any:
        decided = decide(self, *arguments)
        jobs.pause(job)
        return decided

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "_decide", decide_then_pause)
        dispatcher.step(redis)
    turns(dispatcher, redis, clock)
    assert (jobs.show(job).status, jobs.show(job).reason) == ("paused", "Paused by a user")
    assert seats(database) == []


def test_an_old_pause_that_the_broker_refused_does_not_come_after_the_resumption(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = create()
    dispatcher.step(redis)
    opened(redis, job)
    jobs.pause(job)
    jobs.resume(job)
    with database.writing() as connection:
        connection.execute(update(OUTBOX).where(OUTBOX.c.kind == "pause").values(due_ms=clock.ms + 5000))
    dispatcher.step(redis)
    clock.ms += 5001
    dispatcher.step(redis)
    assert RoundStore(redis, job).status() == "running"


def test_a_worker_that_dies_in_a_paused_job_hands_its_leases_back(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, create: Callable[..., str]
) -> None:
    job = create()
    dispatcher.step(redis)
    opened(redis, job)
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join("deadbeef0000")
    redis.hset(JobKeys(job).sessions(), "deadbeef0000", "s1")
    redis.hset(JobKeys(job).leases(), "3", "s1|99|1|deadbeef0000|1")
    Projector(database).step(redis)
    jobs.pause(job)
    dispatcher.step(redis)
    assert jobs.show(job).workers == 0
    assert redis.lrange(JobKeys(job).free(), 0, -1) == [b"3"]


# Trying again


def failed(redis: Redis, database: Database, jobs: Jobs, create: Callable[..., str], dispatcher: Dispatcher) -> str:
    """A job that failed at version 0, as everyone knows by now."""
    job = create()
    dispatcher.step(redis)
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join()
    feed.send("failed", error="no space left on the disk", detail="")
    opened(redis, job)
    redis.set(JobKeys(job).fence(), 7)
    redis.hset(JobKeys(job).strikes(), "aaaa", 2)
    Projector(database).step(redis)
    dispatcher.step(redis)
    assert jobs.show(job).status == "failed" and RoundStore(redis, job).status() == "failed"
    return job


def test_a_retried_job_is_published_anew_without_what_was_left_of_it(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    job = failed(redis, database, jobs, create, dispatcher)
    assert jobs.show(job).error == "no space left on the disk" and jobs.show(job).finished_at is not None
    answer = jobs.retry(job)
    assert (answer.status, answer.error, answer.finished_at) == ("queued", None, None)
    worker = online(redis, queue)
    turns(dispatcher, redis, clock, 1)
    assert RoundStore(redis, job).status() is None and redis.sismember(keys.JOBS, job)
    left = {key.decode() for key in redis.scan_iter(JobKeys(job).pattern())}
    names = JobKeys(job)
    assert left == {names.spec(), names.creator(), names.fence(), names.seats()}
    assert redis.get(names.fence()) == b"7"  # the reducer of the failed rounds stays locked out
    assert queued(redis, worker) == [f"{worker}-{job}-1-1"]


def test_a_job_whose_keys_were_deleted_long_ago_can_be_retried(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
) -> None:
    online(redis, queue)
    job = failed(redis, database, jobs, create, dispatcher)
    for _ in range(30):
        clock.ms += 5001
        dispatcher.step(redis)
    assert not known(redis, job) and job not in Projector(database)._positions()
    jobs.retry(job)
    turns(dispatcher, redis, clock)
    assert known(redis, job) and job in Projector(database)._positions()
    feed = Feed(redis, job, PLAN)
    feed.open(incarnation=2)
    feed.join()
    Projector(database).step(redis)
    assert jobs.show(job).status == "running"


def test_a_retry_delivered_twice_does_not_undo_what_came_of_the_first(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = failed(redis, database, jobs, create, dispatcher)
    jobs.retry(job)
    dispatcher.step(redis)
    opened(redis, job, incarnation=2)
    with database.writing() as connection:  # as if it had died before it wrote down that it was done
        connection.execute(update(OUTBOX).where(OUTBOX.c.kind == "retry").values(done_ms=None))
    turns(dispatcher, redis, clock, 1)
    state = RoundStore(redis, job).read()
    assert state is not None and (state.status, str(state.token)) == ("running", token(0, 2))


def test_the_end_of_a_job_that_comes_after_its_retry_does_not_end_it(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, create: Callable[..., str], clock: Clock
) -> None:
    job = failed(redis, database, jobs, create, dispatcher)
    jobs.retry(job)
    with database.writing() as connection:  # as if the broker had refused it, for want of memory
        late = {"done_ms": None, "due_ms": clock.ms + 5000}
        connection.execute(update(OUTBOX).where(OUTBOX.c.kind == "end").values(late))
    dispatcher.step(redis)
    opened(redis, job, incarnation=2)
    clock.ms += 5001
    dispatcher.step(redis)
    assert RoundStore(redis, job).status() == "running"


def test_a_retry_that_comes_while_the_keys_are_deleted_is_heard(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    online(redis, queue)
    job = failed(redis, database, jobs, create, dispatcher)
    clock.ms += dispatcher_module.RETIRED_MS + 1
    purge = RoundStore.purge

    def retry_then_purge(self: RoundStore) -> None:
        if self.job_id == job:
            jobs.retry(job)
        purge(self)

    with monkeypatch.context() as patch:
        patch.setattr(RoundStore, "purge", retry_then_purge)
        dispatcher.step(redis)
    turns(dispatcher, redis, clock)
    assert known(redis, job) and job in Projector(database)._positions()


PAUSING = [(RoundStore, "pause"), (outbox.Courier, "_note"), (Dispatcher, "_publish")]
STARTING = [(SeatQueue, "enqueue"), (outbox.Courier, "_note"), (Dispatcher, "_publish")]
RESUMING = [(RoundStore, "resume"), *STARTING]
RETRYING = [(RoundStore, "purge"), (RoundStore, "publish"), *STARTING]
STEPS = [
    pytest.param(verb, *step, id=f"{verb}-{step[0].__name__}.{step[1]}")
    for verb, steps in (("pause", PAUSING), ("resume", RESUMING), ("retry", RETRYING))
    for step in steps
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("verb", "owner", "name"), STEPS)
def test_death_at_any_step_leaves_the_job_as_it_was_wanted(
    verb: str,
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if verb == "retry":
        job = failed(redis, database, jobs, create, dispatcher)
    else:
        job = create()
        dispatcher.step(redis)
        opened(redis, job)
    if verb == "resume":
        jobs.pause(job)
        dispatcher.step(redis)
    worker = online(redis, queue)
    getattr(jobs, verb)(job)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), after))
        with pytest.raises(Killed):
            dispatcher.step(redis)
    turns(Dispatcher(database, dispatcher._artifacts_dir), redis, clock)
    if verb == "pause":
        assert RoundStore(redis, job).status() == "paused"
        assert queued(redis, worker) == [] and seats(database) == []
    else:
        assert RoundStore(redis, job).status() == ("running" if verb == "resume" else None)
        assert known(redis, job) and queued(redis, worker) == [f"{worker}-{job}-1-1"]
    with database.engine.connect() as connection:
        assert connection.execute(select(OUTBOX).where(OUTBOX.c.done_ms.is_(None))).all() == []
