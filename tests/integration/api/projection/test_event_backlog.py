"""While no control plane takes a job's events: the oldest submissions become counts, and every total stays exact."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.jobs.submissions import Submissions
from api.projection import projector as projector_module
from api.projection.projector import Projector
from api.tables import EpochStat, Job, LedgerEntry, Submission, WorkerStat, table
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import reducer_session
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.event_stream import SECONDS, WORKERS, Feed, token

SPEC = JobSpec(dataset="digits", model="mlp", rounds=30)
EXACT = ("accepted", "stale", "duplicate", "lease_lost", "fenced", "refused", "bytes_up", "bytes_down", "version")
OF_WORKER = (*EXACT[:-1], "samples", "strikes", "seen_ms")


class Killed(Exception):
    """A process ends here."""


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.create(SPEC).id


@pytest.fixture
def feed(redis: Redis, job: str) -> Feed:
    return Feed(redis, job, SPEC.plan)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 20 events is long."""
    monkeypatch.setattr(reducer_session, "EVENTS_KEPT", 20)
    monkeypatch.setattr(reducer_session, "EVENTS_FOLDED", 10)


@pytest.fixture
def reducer(redis: Redis, feed: Feed) -> ReducerSession:
    redis.set(feed.keys.spec(), "{}")
    reducer = ReducerSession(redis, feed.keys.job_id, "reducer")
    assert reducer.claim("host", 1, 600_000)
    redis.delete(feed.keys.events())
    assert reducer.fold() == 0  # notes how the broker runs; nothing is there yet
    return reducer


def fold(reducer: ReducerSession) -> int:
    moved = 0
    while count := reducer.fold():
        moved += count
    return moved


def kinds(reducer: ReducerSession) -> list[str]:
    keys = (reducer.keys.backlog(), reducer.keys.events())
    return [fields[b"type"].decode() for key in keys for _, fields in reducer.redis.xrange(key)]  # type: ignore[union-attr]


def totals(database: Database, job: str) -> dict[str, Any]:
    """All that is counted of a job."""
    with database.engine.connect() as connection:
        read = {
            model: connection.execute(select(table(model)).where(table(model).c[key] == job)).mappings().all()
            for model, key in ((Job, "id"), (WorkerStat, "job_id"), (EpochStat, "job_id"))
        }
    found: dict[str, Any] = {name: read[Job][0][name] for name in EXACT}
    found |= {row["worker"]: [row[name] for name in OF_WORKER] for row in read[WorkerStat]}
    return found | {row["epoch"]: [row["duplicates_refused"], row["counted"]] for row in read[EpochStat]}


def rows(database: Database, model: Any, job: str) -> list[Any]:
    with database.engine.connect() as connection:
        return list(connection.execute(select(table(model)).where(table(model).c.job_id == job)))


def test_a_stream_that_nobody_reads_keeps_its_newest_events_and_folds_older_submissions(
    redis: Redis, reducer: ReducerSession, feed: Feed, database: Database, jobs: Jobs, history: History, job: str
) -> None:
    feed.open()
    feed.join()
    for number in range(30):
        feed.commit()
        feed.submit(4 * number, WORKERS[1], "duplicate")
        feed.submit(4 * number, WORKERS[1], "stale")
    fold(reducer)
    assert redis.xlen(feed.keys.events()) < 30
    assert kinds(reducer).count("version") == 30 and kinds(reducer).count("submission") < 30
    drain(Projector(database), redis, feed)
    shown = jobs.show(job)
    assert (shown.version, shown.accepted, shown.duplicate, shown.stale) == (30, 114, 30, 30)
    assert (shown.bytes_up, shown.bytes_down) == (174_000, 348_000)
    assert [p.version for p in history.metrics(job).train_loss] == list(range(1, 31))
    assert (
        sum(epoch.duplicates_refused for epoch in history.ledger(job).epochs) == 29 * 32 + 29
    )  # the last of an epoch is short
    assert len(rows(database, LedgerEntry, job)) == 114
    page = Submissions(database).list(job, limit=500)
    assert page.folded == 174 - len(page.items) > 100
    assert redis.xlen(feed.keys.events()) == redis.xlen(feed.keys.backlog()) == 0


def test_what_a_control_plane_has_read_is_not_folded(
    redis: Redis,
    reducer: ReducerSession,
    feed: Feed,
    database: Database,
    jobs: Jobs,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stores what it has read, and dies before it trims; or it sleeps between the two."""

    def die(*_arguments: object) -> None:
        raise Killed

    for micro_batch in range(15):
        feed.submit(micro_batch)
    with monkeypatch.context() as patch:
        patch.setattr(projector_module, "_trim", die)
        with pytest.raises(Killed):
            Projector(database).step(redis)
    assert jobs.show(job).accepted == 15
    for micro_batch in range(15, 60):
        feed.submit(micro_batch)
    assert fold(reducer) == 40
    assert (kinds(reducer).count("submission"), kinds(reducer).count("folded")) == (15 + 20, 3)
    drain(Projector(database), redis, feed)
    assert (jobs.show(job).accepted, jobs.show(job).bytes_up) == (60, 60_000)


def test_a_submission_that_was_refused_afterwards_is_counted_as_refused(
    redis: Redis, reducer: ReducerSession, feed: Feed, database: Database, jobs: Jobs, job: str
) -> None:
    feed.submit(0, nonce="bad")
    feed.submit(1, nonce="open")
    entry = {
        "worker": WORKERS[0],
        "session": "s",
        "nonce": "open",
        "base": "",
        "loss": 1,
        "size": 1,
        "at": 1,
    }
    redis.hset(feed.keys.received(), "1", json.dumps(entry))
    for micro_batch in range(2, 25):
        feed.submit(micro_batch)
    about = {"worker": WORKERS[0], "base": token(0), "reason": "checksum", "strike": True}
    for micro_batch in (0, 5):  # of one submission both, as it had two
        feed.send("refused", **about, nonce="bad", micro_batch=micro_batch)
    for micro_batch in range(25, 40):
        feed.submit(micro_batch)
    fold(reducer)
    feed.send("refused", **about, nonce="open", micro_batch=1)
    Projector(database).step(redis)
    shown = jobs.show(job)
    assert (shown.accepted, shown.refused) == (38, 2)
    assert [row.nonce for row in rows(database, Submission, job) if row.outcome == "refused"] == ["open"]
    (worker,) = rows(database, WorkerStat, job)
    assert (worker.accepted, worker.refused, worker.strikes) == (38, 2, 3)


def test_only_the_newest_reducer_folds(redis: Redis, reducer: ReducerSession, feed: Feed) -> None:
    for micro_batch in range(60):
        feed.submit(micro_batch)
    assert reducer.renew(0)
    after = ReducerSession(redis, reducer.job_id, "after")
    assert after.claim("host", 2, 600_000)
    assert reducer.fold() == 0 and after.fold() == 10


def test_a_broker_without_memory_lets_events_be_folded_and_taken(tmp_path: Path) -> None:
    broker = EmbeddedBroker.start(tmp_path / "broker.log", maxmemory_bytes=8_000_000)
    redis = connect(broker.url, retries=0)
    try:
        reducer = ReducerSession(redis, "a" * 8, "reducer")
        reducer.publish("{}")
        assert reducer.claim("host", 1, 600_000)
        feed = Feed(redis, reducer.job_id, SPEC.plan)
        for micro_batch in range(60):
            feed.submit(micro_batch)
        redis.config_set("maxmemory", 1_000_000)
        assert reducer.fold() == reducer.fold() == 10  # what was there before is moved as it is
        assert len(reducer.take("0-0", 100)) == 61
    finally:
        redis.close()
        broker.stop()


HOSTILE: list[dict[str, Any]] = [
    {"worker": "\x00\xff"},
    {"worker": "w" * 1000},
    {"worker": 5},
    {"bytes_up": 2**39},
    {"bytes_up": -1},
    {"bytes_down": "many"},
    {"seconds": {}},
    {"seconds": SECONDS | {"waiting": None}},
    {"micro_batches": [1.5]},
    {"micro_batches": 3},
    {"late": "x"},
    {"outcome": "none of these"},
    {"base": "nothing"},
    {"nonce": None},
]


def happens(feed: Feed, rng: random.Random, number: int) -> None:
    """Something of what workers and reducers do."""
    what, worker = rng.random(), rng.choice(WORKERS)
    if what < 0.2 and feed.version < 30:
        feed.commit(worker=worker)
    elif what < 0.3:
        feed.submit(rng.randrange(120), worker, "accepted", nonce=f"n{number}")
        if rng.random() < 0.5:
            about = {"worker": worker, "nonce": f"n{number}", "base": token(0), "micro_batch": 1}
            feed.send("refused", **about, reason="checksum", strike=True)
    elif what < 0.4:
        right = {"outcome": "accepted", "current": token(1), "counted": [], "worker": worker, "nonce": f"n{number}"}
        right |= {"base": token(1), "micro_batches": [1, 2, 3], "bytes_up": 10, "bytes_down": 20, "seconds": SECONDS}
        feed.send("submission", **(copy.deepcopy(right) | rng.choice(HOSTILE)))
    else:
        outcome = rng.choice(("accepted", "stale", "duplicate", "lease_lost", "fenced"))
        feed.submit(rng.randrange(120), worker, outcome, nonce=f"n{number}")


class Deaths:
    """When the control plane dies."""

    def __init__(self) -> None:
        self.rng, self.is_safe = random.Random(0), True

    def due(self) -> bool:
        return not self.is_safe and self.rng.random() < 0.3


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Deaths:
    """A control plane that may die before it stores, in the transaction, or before it trims what it stored."""
    deaths = Deaths()
    for name in ("_trim", "save_job", "without_stored"):
        unaltered = getattr(projector_module, name)

        def may_die(*arguments: Any, unaltered: Any = unaltered) -> Any:
            if deaths.due():
                raise Killed
            return unaltered(*arguments)

        monkeypatch.setattr(projector_module, name, may_die)
    monkeypatch.setattr(projector_module, "BATCH", 7)
    return deaths


def kept(redis: Redis, *feeds: Feed) -> list[tuple[str, Any]]:
    """What an append-only file would hold of the jobs' events."""
    names = [name for feed in feeds for name in (feed.keys.events(), feed.keys.backlog(), feed.keys.taken())]
    return [(name, redis.dump(name)) for name in names]


def go_back(redis: Redis, held: list[tuple[str, Any]]) -> None:
    """The broker was killed, and begins another run with what it held once."""
    for name, value in held:
        redis.delete(name)
        if value is not None:
            redis.restore(name, 0, value)
        if name.endswith(":taken"):
            redis.hset(name, "run", "the one before")


def drain(projector: Projector, redis: Redis, *feeds: Feed) -> None:
    while any(redis.xlen(key) for feed in feeds for key in (feed.keys.events(), feed.keys.backlog())):
        projector.step(redis)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_every_total_is_as_if_nothing_had_been_folded_whoever_dies_in_between(
    redis: Redis,
    reducer: ReducerSession,
    feed: Feed,
    jobs: Jobs,
    database: Database,
    job: str,
    deaths: Deaths,
    seed: int,
) -> None:
    """The same happens to two jobs; the events of one alone are folded, at any moment. With an odd seed the broker goes
    back, too, to what it held before events were folded and stored.
    """
    other = jobs.create(SPEC).id
    twin = Feed(redis, other, SPEC.plan)
    rng, projector = random.Random(seed), Projector(database)
    held: list[tuple[str, Any]] = []
    for each in (feed, twin):
        each.open()
        each.join()
        each.join(WORKERS[1], "other", "s2")
    deaths.is_safe = False
    for number in range(400):
        for each in (feed, twin):
            happens(each, random.Random(f"{seed} {number}"), number)
        if rng.random() < 0.2:
            reducer.fold()
        if rng.random() < 0.04 or 200 < number < 210:
            try:
                projector.step(redis)
            except Killed:
                projector = Projector(database)
        if number == 150 and seed % 2:
            held = kept(redis, feed, twin)
        if number == 260 and seed % 2:
            deaths.is_safe = True
            drain(projector, redis, feed, twin)
            go_back(redis, held)
            deaths.is_safe = False
            projector = Projector(database)
    deaths.is_safe = True
    drain(projector, redis, feed, twin)
    assert totals(database, job) == totals(database, other)
    with database.engine.connect() as connection:
        folded = dict(connection.execute(select(table(Job).c.id, table(Job).c.folded)).all())  # type: ignore[arg-type]
    assert folded[job] > 50 and folded[other] == 0
    assert len(rows(database, Submission, job)) == len(rows(database, Submission, other)) - folded[job]
