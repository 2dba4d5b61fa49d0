"""Idle workers of one's own get scoring seats when versions wait and no evaluator keeps up."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import insert, update

from api.database import Database
from api.jobs.service import Jobs
from api.scheduler.dispatcher import Dispatcher
from api.scheduler.machines import INVITE
from api.scheduler.reasons import STARTING_MS
from api.scheduler.scores.seat_plan import CHECKPOINT, WAIT_MS
from api.tables import JOB
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.offers import Offers
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import EVALUATOR, JobKeys
from computeshare.queue.orders import read_orders
from computeshare.types import Token
from tests.support.evaluated_job import save
from tests.support.scheduling_clock import Clock, online, queued, seats

ROUNDS = 10
SPEC = JobSpec(dataset="digits", model="mlp", rounds=ROUNDS)


@pytest.fixture
def scoring(database: Database, tmp_path: Path, redis: Redis, clock: Clock) -> Iterator[Dispatcher]:
    """A dispatcher that has been running for a while, so long that an evaluator would have been seen."""
    found = Dispatcher(database, tmp_path / "artifacts", None, Offers(BundleStore(tmp_path / "bundles")))
    for _ in range(2 + STARTING_MS // 2000):
        found.step(redis)
        clock.ms += 2000
    yield found
    found.rest()
    redis.delete(EVALUATOR)


@pytest.fixture
def trained(
    redis: Redis, database: Database, scoring: Dispatcher, create: Callable[..., str], clock: Clock, tmp_path: Path
) -> Callable[..., tuple[str, list[Token]]]:
    """A job whose rounds are done, with these versions' checkpoints."""

    def make(*versions: int, version: int = ROUNDS, **fields: Any) -> tuple[str, list[Token]]:
        job = create(rounds=ROUNDS, evaluate_every=2, **fields)
        artifacts = Artifacts(tmp_path / "artifacts", job)
        tokens = [save(artifacts, SPEC, each) for each in versions]
        with database.writing() as connection:
            connection.execute(update(JOB).where(JOB.c.id == job).values(version=version))
            for token in tokens:
                row = {"job_id": job, "token": str(token), "incarnation": 1, "version": token.version}
                about = {"at_ms": clock.ms, "voided": False, "sha256": "a" * 64, "bytes": 1}  # as the projector
                connection.execute(insert(CHECKPOINT), row | about)
        scoring.step(redis)
        return job, tokens

    return make


def test_without_an_evaluator_idle_workers_score_each_version_that_is_to_be_scored(
    redis: Redis, scoring: Dispatcher, database: Database, queue: str, jobs: Jobs, trained: Callable[..., Any]
) -> None:
    job, _ = trained(1, 2, 5, ROUNDS)  # 1 and 5 are not asked for
    scoring.step(redis)
    assert seats(database) == []
    assert "start computeshare-evaluator or a worker of your own" in str(jobs.show(job).reason)
    workers = [online(redis, queue) for _ in range(3)]
    scoring.step(redis)
    found = seats(database, "issued")
    assert [(seat.job_id, seat.number, seat.attempt) for seat in found] == [(job, 0, 1), (job, 0, 2)]
    assert {seat.worker for seat in found} < set(workers)
    assert [queued(redis, seat.worker) for seat in found] == [[seat.id] for seat in found]
    assert redis.hgetall(JobKeys(job).seats()) == {}, "a scorer may not join the job"
    scoring.step(redis)
    assert len(seats(database)) == 2
    assert jobs.show(job).reason == "All rounds are done: saving and scoring the last version"


def test_an_evaluator_that_keeps_up_needs_no_workers(
    redis: Redis, scoring: Dispatcher, database: Database, queue: str, trained: Callable[..., Any], clock: Clock
) -> None:
    redis.set(EVALUATOR, "it")
    online(redis, queue)
    job, (first, last) = trained(2, ROUNDS)
    assert seats(database) == []
    for token in (first, last):
        redis.set(JobKeys(job).scoring(str(token)), "it")
    clock.ms += WAIT_MS
    scoring.step(redis)
    assert seats(database) == [], "what it scores waits for nobody"
    redis.delete(JobKeys(job).scoring(str(first)))
    scoring.step(redis)
    assert len(seats(database)) == 1


def test_machines_that_joined_by_an_invite_do_not_score(
    redis: Redis, scoring: Dispatcher, database: Database, queue: str, trained: Callable[..., Any]
) -> None:
    row = {"digest": "d", "created_ms": 1, "expires_ms": 1, "used_ms": 1, "worker": "mac", "gateway": True}
    with database.writing() as connection:
        connection.execute(insert(INVITE), row | {"id": "1a2b3c4d", "queue": queue})
    online(redis, queue, worker="1a2b3c4dwork")
    trained(ROUNDS)
    scoring.step(redis)
    assert [seat for seat in seats(database) if seat.number == 0] == []
    own = online(redis, queue)
    scoring.step(redis)
    assert [seat.worker for seat in seats(database) if seat.number == 0] == [own]


def test_a_job_that_wants_workers_for_training_gets_those_that_score(
    redis: Redis, scoring: Dispatcher, database: Database, queue: str, trained: Callable[..., Any], create: Any
) -> None:
    worker = online(redis, queue)
    trained(ROUNDS)
    (seat,) = seats(database, "issued")
    redis.hset(f"rq:job:{seat.id}", "status", "started")
    online(redis, queue, seat=seat.id, worker=worker)
    job = create()
    scoring.step(redis)
    assert read_orders(redis, worker).leave == seat.id
    redis.hset(f"rq:job:{seat.id}", "status", "finished")
    online(redis, queue, worker=worker)
    for _ in range(2):
        scoring.step(redis)
    assert [(one.job_id, one.number) for one in seats(database, "issued")] == [(job, 1)]
