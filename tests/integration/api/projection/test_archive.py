"""Old versions packed: whatever is asked of a job is answered as before, and whatever is undone is undone as before."""

import random
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection import archive
from api.projection.archive import Block, compact
from api.projection.projector import Projector
from api.tables import Archive, EpochStat, LedgerEntry, VersionRow, WorkerStat, table
from computeshare.jobspec.spec import JobSpec
from tests.support.event_stream import WORKERS, Feed, token
from tests.support.rows import rows

SPEC = JobSpec(dataset="digits", model="mlp", rounds=300)  # 12 rounds an epoch


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 20), ("SPARSE", 5), ("PLAIN", 10), ("AT_ONCE", 20)):
        monkeypatch.setattr(archive, name, value)


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.create(SPEC).id


@pytest.fixture
def projector(database: Database) -> Projector:
    return Projector(database)


def train(feed: Feed, versions: int, save: bool = True) -> None:
    for _ in range(versions):
        feed.commit(loss=1 / (1 + feed.version), worker=WORKERS[feed.version % 2])
    if save:
        feed.save()


def answers(history: History, job: str) -> list[Any]:
    """All that is told of versions and the ledger."""
    told: list[Any] = [history.metrics(job, since, points) for since in (0, 7, 55) for points in (1000, 100)]
    told += [history.versions(job, since, limit) for since, limit in ((0, 1000), (17, 5), (60, 30))]
    return [*told, "".join(history.csv(job)), history.ledger(job), history.columns(job, 1000)]


def everything(database: Database, job: str) -> list[Any]:
    """The rows of versions, ledger and counters, unpacked, without the job's id."""
    with database.writing() as connection:
        archive.unpack_rows(connection, job, SPEC.plan.rounds_per_epoch, 0)
    with database.engine.connect() as connection:
        found = []
        for model in (VersionRow, LedgerEntry, EpochStat, WorkerStat):
            columns = [column for column in table(model).c if column.name not in ("job_id", "samples_per_s")]
            read = connection.execute(select(*columns).where(table(model).c.job_id == job))
            found.append(sorted(map(repr, read)))
        return found


def test_old_versions_are_packed_and_every_answer_stays_the_same(
    redis: Redis, projector: Projector, database: Database, history: History, job: str
) -> None:
    feed = Feed(redis, job, SPEC.plan)
    feed.open()
    train(feed, 100)
    projector.step(redis)
    before = answers(history, job)
    assert compact(database) == 4 and compact(database) == 0
    assert answers(history, job) == before
    assert sorted(row.first for row in rows(database, Archive)) == [1, 21, 41, 61]
    assert len(rows(database, VersionRow)) == 20 + 80 // 5
    assert {row.version for row in rows(database, LedgerEntry)} == {*range(5, 81, 5), *range(81, 101)}
    assert [p.version for p in history.metrics(job, 0, 10).train_loss] == list(range(10, 101, 10))


def test_what_is_not_durable_or_of_an_open_epoch_stays_as_it_is(
    redis: Redis, projector: Projector, database: Database, job: str
) -> None:
    feed = Feed(redis, job, SPEC.plan)
    feed.open()
    train(feed, 39)
    train(feed, 60, save=False)
    projector.step(redis)
    assert compact(database) == 1
    feed.save()
    projector.step(redis)
    assert compact(database) == 3  # up to version 80, though 96 end an epoch: the newest are not packed


def test_packing_takes_turns(
    redis: Redis, projector: Projector, database: Database, monkeypatch: Any, job: str
) -> None:
    monkeypatch.setattr(archive, "AT_ONCE", 3)
    feed = Feed(redis, job, SPEC.plan)
    feed.open()
    train(feed, 100)
    projector.step(redis)
    assert [compact(database) for _ in range(3)] == [3, 1, 0]


def test_a_block_holds_exactly_what_it_was_made_of() -> None:
    row = {"token": token(1), "incarnation": 1, "version": 1, "epoch": 0, "loss": None, "sha256": None, "samples": 3}
    row |= {"samples_per_s": 1e-17, "bytes_up": 2**50, "bytes_down": 0, "seconds": '{"a":1.5}', "at_ms": 1, "voided": 1}
    row |= {"consensus": 0.25}
    again = row | {"token": f"{token(1)}~5", "sha256": "ab" * 32, "loss": 0.1 + 0.2, "version": 2, "at_ms": -4}
    part = {"micro_batch": 7, "worker": "w", "samples": 3, "voided": 1, "staleness": 0}
    ledger = [part | {name: one[name] for name in ("token", "incarnation", "version", "epoch")} for one in (row, again)]
    assert archive.decode(archive.encode(Block([row, again], ledger))) == Block([row, again], ledger)
    assert archive.decode(archive.encode(Block([row], []))) == Block([row], [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_is_restored_or_goes_back_ends_as_if_nothing_had_been_packed(
    redis: Redis, database: Database, history: History, jobs: Jobs, tmp_path: Path, job: str, seed: int
) -> None:
    """The same happens to two jobs, of which one is packed whenever it may be."""
    other = jobs.create(SPEC).id
    projector = Projector(database, tmp_path)
    rng = random.Random(seed)
    feeds = [Feed(redis, one, SPEC.plan) for one in (job, other)]
    for feed in feeds:
        feed.open()
        feed.join()
    packed = 0
    for turn in range(8):
        number, what, back = rng.randint(5, 60), rng.random(), rng.randint(0, feeds[0].version)
        for feed in feeds:
            if what < 0.4 and turn:  # the broker lost the job: it goes on from an older checkpoint
                feed.open(back, feed.incarnation + 1, restored=True)
            elif what < 0.6 and turn:  # the broker came back older: versions are made again
                feed.version = back
            train(feed, min(number, 300 - feed.version))
        while projector.step(redis):
            pass
        held = everything_of(database, other)
        packed += compact_one(database, job, other)
        assert everything_of(database, other) == held
        assert answers(history, job) == answers(history, other)
    assert packed > 3
    assert everything(database, job) == everything(database, other)


def everything_of(database: Database, job: str) -> int:
    return sum(row.job_id == job for row in rows(database, VersionRow))


def compact_one(database: Database, job: str, other: str) -> int:
    """Pack one job, and have the other as it was."""
    packed = compact(database)
    with database.writing() as connection:
        unpacked = archive.unpack_rows(connection, other, SPEC.plan.rounds_per_epoch, 0)
    return packed - unpacked
