"""The totals of epochs that are kept while events are taken are those that the ledger adds up to."""

import random
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.jobs.service import Jobs
from api.projection.epochs import recount
from api.projection.projector import Projector
from api.tables import EpochStat, table
from computeshare.jobspec.spec import JobSpec
from tests.support.event_stream import WORKERS, Feed

SPEC = JobSpec(dataset="digits", model="mlp", micro_batch=200, micro_batches_per_round=3, epochs=50)


def totals(database: Database) -> dict[int, tuple[int, int]]:
    columns = table(EpochStat).c
    with database.engine.connect() as connection:
        rows: Any = connection.execute(select(columns.epoch, columns.counted, columns.covered))
        return {epoch: (counted, covered) for epoch, counted, covered in rows}


@pytest.mark.parametrize("seed", range(8))
def test_kept_totals_are_what_the_ledger_adds_up_to(seed: int, redis: Redis, database: Database, jobs: Jobs) -> None:
    seeded, job = random.Random(seed), jobs.create(SPEC).id
    feed, projector = Feed(redis, job, SPEC.plan), Projector(database)
    feed.open()
    for _ in range(60):
        what = seeded.random()
        if what < 0.8:
            feed.commit(worker=seeded.choice(WORKERS))
        elif what < 0.87:  # the broker is lost: some versions are undone, and made again
            feed.open(seeded.randint(0, feed.version), feed.incarnation + 1, restored=True)
        elif what < 0.94 and feed.version:  # a micro-batch counted twice, by a version under another token
            feed.version -= 1
            feed.incarnation += 1
            feed.commit(submissions=False)
        else:
            projector.step(redis)
    projector.step(redis)
    kept = totals(database)
    with database.writing() as connection:
        recount(connection, job, 0)
    assert kept == totals(database) and sum(counted for counted, _ in kept.values()) > 0


def test_events_taken_twice_count_once(redis: Redis, database: Database, jobs: Jobs) -> None:
    job = jobs.create(SPEC).id
    feed = Feed(redis, job, SPEC.plan)
    feed.open()
    feed.commit()
    feed.version = 0
    feed.commit(submissions=False)  # the same version, told again
    Projector(database).step(redis)
    assert totals(database) == {0: (600, 600)}
