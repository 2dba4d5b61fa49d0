"""The event streams of a real broker, taken into SQLite."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

import tests.support.event_stream as feeding
from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.jobs.submissions import Submissions
from api.projection import projector as projector_module
from api.projection import row_retention
from api.projection.projector import Projector
from api.tables import LedgerEntry, Outbox, Submission, VersionRow, WorkerStat
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import SECONDS, WORKERS, Feed, token
from tests.support.rows import rows

SPEC = JobSpec(dataset="digits", model="mlp", rounds=30)  # 1437 samples: 45 micro-batches, 12 rounds an epoch


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.create(SPEC).id


@pytest.fixture
def feed(redis: Redis, job: str) -> Feed:
    return Feed(redis, job, SPEC.plan)


@pytest.fixture
def projector(database: Database) -> Projector:
    return Projector(database)


def test_first_worker_makes_the_job_run(redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str) -> None:
    feed.open()
    projector.step(redis)
    assert jobs.show(job).status == "queued"
    feed.join()
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.workers, shown.reason) == ("running", 1, None)
    assert shown.started_at is not None


def test_a_round_shows_in_the_job_and_its_history(
    database: Database, redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, history: History, job: str
) -> None:
    feed.send("reducer", host="mac-mini", pid=42, fence=1)
    feed.open()
    feed.join()
    feed.commit(loss=2.5)
    feed.commit(loss=2.0, worker=WORKERS[1])
    feed.submit(1, outcome="stale")
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.version, shown.epoch, shown.loss, shown.rounds_total) == (2, 0, 2.0, 30)
    assert (shown.accepted, shown.stale, shown.bytes_up, shown.bytes_down) == (8, 1, 9000, 18_000)
    assert shown.reducer is not None and (shown.reducer.host, shown.reducer.pid) == ("mac-mini", 42)
    assert shown.weights_sha256 == f"{2:064x}"
    assert [(p.version, p.value) for p in history.metrics(job).train_loss] == [(1, 2.5), (2, 2.0)]
    workers = {w.id: w for w in history.workers(job).items}
    assert workers[WORKERS[0]].share == workers[WORKERS[1]].share == 0.5
    assert (workers[WORKERS[0]].accepted, workers[WORKERS[0]].stale, workers[WORKERS[1]].accepted) == (4, 1, 4)
    newest = Submissions(database).list(job, limit=1).items[0]
    assert (newest.outcome, newest.base_version, newest.seconds.computing) == ("stale", 2, 0.2)


def test_what_is_stored_is_trimmed(redis: Redis, feed: Feed, projector: Projector) -> None:
    feed.open()
    feed.commit()
    assert projector.step(redis) == 6
    assert redis.xlen(feed.keys.events()) == 0
    assert projector.step(redis) == 0


def test_a_crash_before_trimming_counts_nothing_twice(
    redis: Redis, feed: Feed, database: Database, jobs: Jobs, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_arguments: object) -> None:
        raise RuntimeError("killed before the stream was trimmed")

    feed.open()
    feed.join()
    feed.commit()
    with monkeypatch.context() as patch:
        patch.setattr(projector_module, "_trim", crash)
        with pytest.raises(RuntimeError):
            Projector(database).step(redis)
    before = jobs.show(job)
    feed.commit()
    assert Projector(database).step(redis) == 5  # those since, though all are still in the stream
    after = jobs.show(job)
    assert (before.accepted, after.accepted, after.version) == (4, 8, 2)


def test_a_crash_before_storing_loses_nothing(
    redis: Redis, feed: Feed, database: Database, jobs: Jobs, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_arguments: object) -> None:
        raise RuntimeError("killed inside the transaction")

    feed.open()
    feed.commit()
    with monkeypatch.context() as patch:
        patch.setattr(projector_module, "save_job", crash)
        with pytest.raises(RuntimeError):
            Projector(database).step(redis)
    assert (jobs.show(job).version, rows(database, Submission)) == (0, [])
    Projector(database).step(redis)
    assert (jobs.show(job).version, jobs.show(job).accepted) == (1, 4)


def test_events_delivered_again_change_nothing(
    redis: Redis, feed: Feed, projector: Projector, database: Database, jobs: Jobs, job: str
) -> None:
    feed.open()
    feed.join()
    for _ in range(3):
        feed.commit()
    entries: Any = redis.xrange(feed.keys.events())
    projector.step(redis)
    first = jobs.show(job)
    redis.delete(feed.keys.events())
    for stream_id, fields in entries[:-1]:  # the broker came back with an older copy of the stream, its end lost
        redis.xadd(feed.keys.events(), fields, id=stream_id)
    for _ in range(projector_module.STREAM_CHECK_TURNS):
        projector.step(redis)
    second = jobs.show(job)
    assert redis.xlen(feed.keys.events()) == 0
    assert (second.accepted, second.bytes_up, second.version) == (first.accepted, first.bytes_up, 3)
    assert len(rows(database, Submission)) == 12
    assert len(rows(database, LedgerEntry)) == 12


def test_a_stream_that_begins_anew_with_lower_ids_is_read_from_its_start(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str
) -> None:
    feed.open()
    feed.commit()
    projector.step(redis)
    redis.delete(feed.keys.events())
    fields: Any = {"type": "reducer", "at": 5, "data": '{"host": "after-the-clock-went-back", "pid": 7}'}
    redis.xadd(feed.keys.events(), fields, id="1000-0")
    for _ in range(projector_module.STREAM_CHECK_TURNS):
        projector.step(redis)
    reducer = jobs.show(job).reducer
    assert reducer is not None and reducer.host == "after-the-clock-went-back"
    assert redis.xlen(feed.keys.events()) == 0


def test_ledger_shows_each_sample_of_an_epoch_counted_once(
    redis: Redis, feed: Feed, projector: Projector, history: History, job: str
) -> None:
    feed.open()
    for _ in range(14):
        feed.commit()
    projector.step(redis)
    first, second = history.ledger(job).epochs
    assert (first.samples, first.counted, first.missing) == (1437, 1437, 0)
    assert (second.samples, second.counted, second.missing) == (2 * 4 * 32, 2 * 4 * 32, 0)


def test_ledger_would_show_a_sample_counted_twice_or_never(
    redis: Redis, feed: Feed, projector: Projector, history: History, job: str
) -> None:
    feed.open()
    feed.commit()
    feed.version -= 1  # a reducer gone wrong: the same round again, as version 2
    feed.plan.round(0)
    counted = [[0, WORKERS[0], 32], [1, WORKERS[0], 32], [2, WORKERS[0], 32]]
    about = {"token": token(2), "version": 2, "base": token(1), "epoch": 0, "sha256": "0" * 64, "counted": counted}
    feed.send("version", **about, loss=1.0, seconds={})
    projector.step(redis)
    epoch = history.ledger(job).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (256, 128 + 96, 128)


def test_reassignment_and_duplicates_are_counted_in_samples(
    redis: Redis, feed: Feed, projector: Projector, history: History, jobs: Jobs, job: str
) -> None:
    feed.open()
    lease = {"from": WORKERS[0], "to": WORKERS[1], "after_ms": 3000}
    feed.send("reassigned", version=0, micro_batch=2, **lease)
    feed.commit(doubled=[3])
    feed.submit(2, worker=WORKERS[0], outcome="duplicate")
    projector.step(redis)
    epoch = history.ledger(job).epochs[0]
    assert (epoch.reassigned, epoch.duplicates_refused, epoch.counted) == (64, 32, 128)
    assert jobs.show(job).reassigned == 2


def test_restore_voids_the_lost_branch_and_goes_on(
    redis: Redis, feed: Feed, projector: Projector, history: History, jobs: Jobs, database: Database, job: str
) -> None:
    feed.open()
    feed.join()
    for loss in (3.0, 2.0, 1.0):
        feed.commit(loss)
        if feed.version == 1:
            feed.save()
            feed.score(0.5)
    projector.step(redis)
    assert jobs.show(job).version == 3
    feed.open(version=1, incarnation=2, restored=True)
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.version, shown.loss, shown.durable_version, shown.accuracy) == (1, 3.0, 1, 0.5)
    assert shown.workers == 0  # their sessions went with the broker
    assert [p.version for p in history.metrics(job).train_loss] == [1]
    feed.commit(2.0)
    feed.commit(1.0)
    projector.step(redis)
    assert jobs.show(job).version == 3
    epoch = history.ledger(job).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (384, 384, 0)
    voided = {row.token for row in rows(database, VersionRow) if row.voided}
    assert voided == {token(2, 1), token(3, 1)}
    assert [s.voided for s in Submissions(database).list(job, limit=100).items].count(True) == 8


@pytest.mark.parametrize("same_bits", [True, False])
def test_versions_that_the_broker_lost_and_that_are_done_again_count_once(
    redis: Redis,
    feed: Feed,
    projector: Projector,
    history: History,
    jobs: Jobs,
    database: Database,
    job: str,
    same_bits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed.open()
    feed.join()
    feed.join(WORKERS[1])
    for _ in range(5):
        feed.commit()
    projector.step(redis)
    feed.version = 2  # the broker came back without versions 3 to 5
    if not same_bits:
        monkeypatch.setattr(
            feeding, "token", lambda version, incarnation=1: f"{incarnation}.{version}.{version + 4096:016x}"
        )
    for _ in range(2):
        feed.commit(worker=WORKERS[1])
    projector.step(redis)
    assert jobs.show(job).version == 4 and jobs.show(job).workers == 2  # their sessions may stand
    feed.commit(worker=WORKERS[1])
    projector.step(redis)
    epoch = history.ledger(job).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (640, 640, 0)
    standing = [row.version for row in rows(database, VersionRow) if not row.voided]
    assert sorted(standing) == [1, 2, 3, 4, 5]
    by = {row.version: row.worker for row in rows(database, LedgerEntry) if not row.voided}
    assert by == {1: WORKERS[0], 2: WORKERS[0], 3: WORKERS[1], 4: WORKERS[1], 5: WORKERS[1]}
    assert "went_back" in [event.type for event in history.timeline(job)]


def test_a_chains_workers_keep_their_shares_of_the_samples_when_the_broker_loses_versions(
    redis: Redis, feed: Feed, projector: Projector, history: History, job: str
) -> None:
    feed.open()
    for worker in WORKERS[:2]:
        feed.join(worker)
    feed.send("split", stages=[{"layers": [name], "parameters": 1} for name in "abcd"])
    runs = (WORKERS[0], 0, 1), (WORKERS[1], 1, 4)
    chain = [{"worker": worker, "first": first, "stop": stop} for worker, first, stop in runs]
    feed.send("placed", number=1, chains=[chain])
    for _ in range(4):
        feed.commit()
    projector.step(redis)
    assert {one.id: one.share for one in history.workers(job).items} == {WORKERS[0]: 0.25, WORKERS[1]: 0.75}
    whole = sum(one.samples for one in history.workers(job).items)
    feed.version = 1
    feed.commit()
    projector.step(redis)
    found = {one.id: one.samples for one in history.workers(job).items}
    assert found == {WORKERS[0]: whole // 8, WORKERS[1]: 3 * whole // 8}, "of two versions in place of four"


def test_ids_that_a_broker_gives_a_second_time_lose_no_event_and_double_none(
    redis: Redis, feed: Feed, database: Database, history: History, jobs: Jobs, job: str
) -> None:
    feed.open()
    feed.join()
    ids = [feed.submit(m) for m in range(4)]
    Projector(database).step(redis)
    redis.delete(feed.keys.events())
    for number, stream_id in enumerate(ids):  # its clock went back, too: other submissions under the same ids
        feed.submit(number, nonce=f"again {number}")
        ((_, fields),) = redis.xrange(feed.keys.events())  # type: ignore[misc]
        redis.delete(feed.keys.events())
        redis.xadd("kept", fields, id=stream_id)
    redis.rename("kept", feed.keys.events())
    entries = redis.dump(feed.keys.events())
    assert Projector(database).step(redis) == 4
    redis.restore(feed.keys.events(), 0, entries, replace=True)  # killed before it was trimmed
    assert Projector(database).step(redis) == 0
    assert jobs.show(job).accepted == 8
    assert len({s.nonce for s in Submissions(database).list(job, limit=100).items}) == 8


def brought(feed: Feed, worker: str, *numbers: int) -> dict[str, Any]:
    """The entry of a checkpoint's ledger for the version after the feed's, made of these micro-batches."""
    done = feed.plan.round(feed.version)
    base = token(feed.version, feed.incarnation)
    feed.version += 1
    about = {"token": token(feed.version, feed.incarnation), "version": feed.version, "base": base, "loss": 0.5}
    counted = [[m, worker, feed.plan.size(m)] for m in numbers]
    about |= {"epoch": done.epoch, "sha256": f"{feed.version:064x}", "counted": counted, "seconds": {"step": 0.1}}
    return {"at": feed.at_ms, "data": about}


def save(artifacts: Path, job: str, feed: Feed, ledger: list[dict[str, Any]]) -> None:
    tensors = {"w": np.zeros(1, np.float32)}
    saved = Token.parse(token(feed.version, feed.incarnation))
    write_checkpoint(Artifacts(artifacts, job), saved, tensors, b"", f"{feed.version:064x}", 0, 0, (), ledger)


def test_restore_reads_from_the_checkpoint_what_was_lost_with_the_broker(
    redis: Redis, feed: Feed, database: Database, history: History, jobs: Jobs, job: str, tmp_path: Path
) -> None:
    projector = Projector(database, tmp_path)
    feed.open()
    feed.join()
    feed.join(WORKERS[1], session="s2")
    feed.commit()
    projector.step(redis)
    lost = [brought(feed, WORKERS[1], 4, 6, 7), brought(feed, WORKERS[0], 5, 8, 9, 10, 11)]  # 5 was carried over
    save(tmp_path, job, feed, lost)
    feed.open(version=3, incarnation=2, restored=True)
    feed.commit()
    projector.step(redis)
    epoch = history.ledger(job).epochs[0]
    assert (jobs.show(job).version, epoch.samples, epoch.counted, epoch.missing) == (4, 512, 512, 0)
    ledger = {row.micro_batch: (row.version, row.worker) for row in rows(database, LedgerEntry)}
    assert ledger[5] == (3, WORKERS[0]) and ledger[6] == (2, WORKERS[1])
    assert {row.worker: row.samples for row in rows(database, WorkerStat)} == {WORKERS[0]: 13 * 32, WORKERS[1]: 96}
    assert [p.value for p in history.metrics(job).train_loss] == [1.0, 0.5, 0.5, 1.0]
    recovered = [event for event in history.timeline(job) if event.type == "recovered"]
    assert [event.data for event in recovered] == [{"version": 3, "micro_batches": 8}]


def test_restore_takes_nothing_twice_and_nothing_of_a_branch_that_was_lost(
    redis: Redis, feed: Feed, database: Database, history: History, job: str, tmp_path: Path
) -> None:
    projector = Projector(database, tmp_path)
    feed.open()
    feed.commit()
    feed.commit()
    projector.step(redis)
    feed.version = 0
    known = [brought(feed, WORKERS[0], *range(4)), brought(feed, WORKERS[0], *range(4, 8))]
    save(tmp_path, job, feed, known)
    other = brought(feed, WORKERS[0], 8, 9)  # a version 3 that no checkpoint in use was made after
    other["data"]["token"] = "1.3." + "f" * 16
    feed.version = 4
    save(tmp_path, job, feed, [other, {"at": "soon", "data": other["data"]}])
    feed.open(version=2, incarnation=2, restored=True)
    projector.step(redis)
    epoch = history.ledger(job).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (256, 256, 0)
    assert not [event for event in history.timeline(job) if event.type == "recovered"]


def test_restore_shows_what_nothing_tells_of_as_missing(
    redis: Redis, feed: Feed, database: Database, history: History, job: str, tmp_path: Path
) -> None:
    feed.open(version=2, incarnation=2, restored=True)
    Projector(database, tmp_path).step(redis)
    assert history.ledger(job).epochs[0].missing == 256


def test_restart_from_nothing_voids_everything(
    redis: Redis, feed: Feed, projector: Projector, history: History, jobs: Jobs, job: str
) -> None:
    feed.open()
    feed.commit()
    feed.open(version=0, incarnation=2)
    projector.step(redis)
    assert (jobs.show(job).version, history.ledger(job).epochs) == (0, [])


def test_refused_submission_changes_its_outcome_once(
    database: Database, redis: Redis, feed: Feed, projector: Projector, history: History, jobs: Jobs, job: str
) -> None:
    feed.open()
    feed.join()
    feed.submit(0, nonce="n1")
    for micro_batch in (0, 1):  # both micro-batches of the one submission
        about = {"worker": WORKERS[0], "nonce": "n1", "base": token(0), "micro_batch": micro_batch}
        feed.send("refused", **about, reason="values that are not finite")
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.accepted, shown.refused) == (0, 1)
    submission = Submissions(database).list(job, outcome="refused").items[0]
    assert submission.reason == "values that are not finite"
    worker = history.workers(job).items[0]
    assert (worker.accepted, worker.refused, worker.refused_reason) == (0, 1, "values that are not finite")


@pytest.mark.parametrize("missing", ["checkpoint", "scored", "version"])
def test_completes_only_when_the_last_version_is_durable_and_scored(
    missing: str, redis: Redis, database: Database, projector: Projector, jobs: Jobs
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=2)
    job = jobs.create(spec).id
    feed = Feed(redis, job, spec.plan)
    feed.open()
    feed.join()
    feed.commit()
    if missing != "version":
        feed.commit()
    if missing != "checkpoint":
        feed.save()
    if missing != "scored":
        feed.score()
    projector.step(redis)
    assert jobs.show(job).status == "running"
    if missing == "version":
        feed.commit()
    feed.save()
    feed.score(0.95)
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.accuracy, shown.best_accuracy) == ("completed", 0.95, 0.95)
    assert shown.finished_at is not None
    ends = [row.payload for row in rows(database, Outbox) if row.kind == "end"]
    assert ends == [{"status": "completed"}]


def test_failure_is_kept_with_its_traceback(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str
) -> None:
    feed.send("failed", error="diverged at version 7", detail="Traceback: ...")
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.error) == ("failed", "diverged at version 7\n\nTraceback: ...")


def test_end_decided_by_a_user_stands(redis: Redis, projector: Projector, jobs: Jobs) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=1)
    job = jobs.create(spec).id
    feed = Feed(redis, job, spec.plan)
    jobs.cancel(job)
    feed.open()
    feed.join()
    feed.commit()
    feed.save()
    feed.score()
    feed.send("failed", error="late", detail="")
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.error, shown.version, shown.workers) == ("cancelled", None, 1, 0)


def test_announcements_that_are_repeated_show_once(
    redis: Redis, feed: Feed, projector: Projector, history: History, job: str, tmp_path: Path
) -> None:
    feed.open()
    feed.commit()
    for _ in range(2):
        feed.save()
        feed.score()
        projector.step(redis)
    feed.save()
    feed.save()
    projector.step(redis)
    kinds = [event.type for event in history.timeline(job)]
    assert (kinds.count("checkpoint"), kinds.count("scored")) == (1, 1)


def test_deleted_job_does_not_come_back(redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str) -> None:
    feed.open()
    jobs.cancel(job)
    jobs.delete(job)
    feed.commit()
    projector.step(redis)
    assert job not in [j.id for j in jobs.list().items]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("submission", "{}"),
        ("submission", "[1, 2]"),
        ("submission", "not json"),
        ("submission", '{"outcome": "won", "worker": "w", "micro_batches": [], "counted": []}'),
        ("version", '{"token": "1.99999999999999999999999999.0000000000000000"}'),
        ("version", '{"token": "1.1./etc/passwd.....", "version": 1}'),
        ("joined", '{"worker": 5, "session": null}'),
        ("joined", '{"worker": "\\ud800", "session": "s", "seat": "s", "name": "n", "device": "d"}'),
        ("checkpoint", '{"token": "1.1.0000000000000001", "sha256": "x", "bytes": 1e400}'),
        ("scored", '{"token": "1.1.0000000000000001", "loss": NaN, "accuracy": NaN, "samples": 1}'),
        ("left", '{"worker": "w", "session": "s", "reason": "r", "freed": {"a": 1}}'),
        ("reassigned", '{"micro_batch": -1}'),
        ("opened", '{"token": "1.0.0000000000000000", "sha256": "x", "parameters": -5, "restored": 0}'),
        ("failed", '{"error": "e"}'),
        ("reducer", "[" * 100_000),
    ],
)
def test_hostile_event_is_passed_over_and_blocks_nothing(
    kind: str, data: str, redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str
) -> None:
    fields: Any = {"type": kind, "at": feed.at_ms, "data": data}
    redis.xadd(feed.keys.events(), fields)
    redis.xadd(feed.keys.events(), {"type": kind, "at": "1e999", "data": "{}"})
    redis.xadd(feed.keys.events(), {"nothing": "at all"})
    redis.xadd(feed.keys.events(), {b"\xff": b"\xff", "type": b"\xff\xfe", "at": "1", "data": "{}"})
    feed.open()
    feed.commit()
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.version, shown.status, shown.durable_version) == (1, "queued", 0)
    assert redis.xlen(feed.keys.events()) == 0


LEASE = {"from": "a", "to": "b", "after_ms": 3000}
VALID: dict[str, dict[str, Any]] = {
    "submission": {
        "outcome": "accepted",
        "worker": "w",
        "session": "s",
        "nonce": "n",
        "base": token(1),
        "current": token(1),
        "micro_batches": [1],
        "counted": [1],
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": SECONDS,
    },
    "version": {
        "token": token(2),
        "epoch": 0,
        "loss": 1.0,
        "sha256": "a",
        "counted": [[1, "w", 32]],
        "seconds": {"step": 1.0},
    },
    "opened": {"token": token(1), "sha256": "a", "restored": True, "parameters": 1},
    "reducer": {"host": "h", "pid": 1},
    "joined": {"worker": "w", "session": "s", "seat": "x", "name": "n", "device": "cpu"},
    "left": {"worker": "w", "session": "s", "reason": "r", "freed": [1]},
    "banned": {"worker": "w", "session": "s", "strikes": 5, "reason": "r"},
    "reassigned": {"version": 1, "micro_batch": 1, **LEASE},
    "closed": {"version": 1, "received": 3, "total": 4},
    "refused": {"worker": "w", "nonce": "n", "micro_batch": 1, "reason": "r"},
    "checkpoint": {"token": token(1), "sha256": "a", "bytes": 1},
    "unscored": {"version": 1, "error": "e"},
    "scored": {"token": token(1), "loss": 1.0, "accuracy": 0.5, "samples": 1, "own_metrics": {"f1": 0.5}},
}
HOSTILE: list[Any] = [
    None, True, -1, 2**53, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "\x00", "x" * 50_000, "\u2028ä",
    [], [[]], {}, {"a": {}}, [2**70], [[1, 2, 3]], "9.9.ffffffffffffffff", "-1.5.ffffffffffffffff", "1.2.", [0] * 5000,
]  # fmt: skip


@pytest.mark.parametrize("kind", VALID)
def test_job_stays_readable_whatever_one_field_of_an_event_holds(
    kind: str,
    database: Database,
    redis: Redis,
    feed: Feed,
    projector: Projector,
    jobs: Jobs,
    history: History,
    job: str,
) -> None:
    feed.open()
    feed.commit()
    projector.step(redis)
    for field in VALID[kind]:
        for value in HOSTILE:
            feed.send(kind, **{**VALID[kind], field: value})
    projector.step(redis)
    feed.send("reducer", host="still-read", pid=1)
    projector.step(redis)
    shown = jobs.show(job)
    assert shown.reducer is not None and shown.reducer.host == "still-read"
    answers = [
        shown,
        jobs.list(),
        history.metrics(job),
        Submissions(database).list(job, limit=500),
        history.ledger(job),
    ]
    answers += [history.workers(job), history.checkpoints(job), *history.events(job), *history.timeline(job)]
    for answer in answers:
        text = answer.model_dump_json()
        assert "NaN" not in text and "Infinity" not in text
        assert len(text) < 500_000


def test_hostile_worker_name_is_bounded_and_kept_as_text(
    redis: Redis, feed: Feed, projector: Projector, history: History, job: str
) -> None:
    feed.open()
    feed.join(name="<script>alert(1)</script>" + "x" * 10_000)
    projector.step(redis)
    name = history.workers(job).items[0].name
    assert name.startswith("<script>") and len(name) == 100


def test_oldest_submissions_and_events_are_forgotten_and_the_ledger_never(
    redis: Redis,
    feed: Feed,
    projector: Projector,
    database: Database,
    history: History,
    jobs: Jobs,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = jobs.create(SPEC).id
    feed.open()
    for _ in range(30):
        feed.commit()
    projector.step(redis)
    before = (history.ledger(job), history.metrics(job), jobs.show(job).accepted)
    newest = Submissions(database).list(job, limit=20).items
    monkeypatch.setattr(row_retention, "KEPT", 20)
    monkeypatch.setattr(row_retention, "SLICE", 7)
    assert row_retention.thin(database) == (45 + 45 + 24 - 20) + (30 - 20)
    assert Submissions(database).list(job, limit=500).items == newest
    assert [e.type for e in history.timeline(job)] == ["opened", "created"]
    assert [e.data["version"] for e in history.events(job) if e.type == "version"] == list(range(11, 31))
    assert (history.ledger(job), history.metrics(job), jobs.show(job).accepted) == before
    assert [e.type for e in history.events(other)] == ["created"]
    assert row_retention.thin(database) == 0


def test_the_sessions_of_one_worker_do_not_fill_the_timeline(
    redis: Redis,
    feed: Feed,
    projector: Projector,
    database: Database,
    history: History,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed.open()
    feed.join("the other", session="s")
    for number in range(30):
        feed.join(session=f"s{number}")
    feed.commit()
    projector.step(redis)
    monkeypatch.setattr(row_retention, "KEPT", 20)
    assert row_retention.thin(database) == 10
    kinds = [event.type for event in history.events(job)]
    assert (kinds.count("joined"), kinds.count("version"), kinds.count("opened")) == (21, 1, 1)


@pytest.fixture
def fast(redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str) -> None:
    """The job has made 20 versions in two seconds, and none in the minute since."""
    seconds, _ = redis.time()
    feed.at_ms = seconds * 1000 - 62_000
    feed.open()
    feed.join()
    for _ in range(20):
        feed.commit()
    projector.step(redis)
    assert jobs.show(job).samples_per_s == pytest.approx(1280, rel=0.1)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("restarted", [False, True], ids=["as it goes", "before the control plane started"])
def test_a_job_that_stands_still_has_no_rate(
    redis: Redis, projector: Projector, database: Database, jobs: Jobs, job: str, restarted: bool
) -> None:
    looking = Projector(database) if restarted else projector
    for _ in range(projector_module.RATE_TURNS):
        looking.step(redis)
    assert (jobs.show(job).status, jobs.show(job).samples_per_s) == ("running", 0)


@pytest.mark.usefixtures("fast")
def test_a_pause_is_no_part_of_the_rate_after_it(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, job: str
) -> None:
    jobs.pause(job)
    for _ in range(projector_module.RATE_TURNS):
        projector.step(redis)
    jobs.resume(job)
    seconds, _ = redis.time()
    feed.at_ms = seconds * 1000
    feed.join()
    for _ in range(2):
        feed.commit()
    projector.step(redis)
    assert jobs.show(job).samples_per_s == pytest.approx(1280, rel=0.1)


@pytest.mark.parametrize("settled", ["scored", "damaged"])
def test_a_job_is_complete_once_every_version_that_was_to_be_scored_is_or_cannot_be(
    redis: Redis, projector: Projector, jobs: Jobs, settled: str
) -> None:
    spec = SPEC.model_copy(update={"rounds": 2, "evaluate_every": 1})
    job = jobs.create(spec).id
    feed = Feed(redis, job, spec.plan)
    feed.open()
    feed.join()
    for _ in range(2):
        feed.commit()
        feed.save()
    feed.score()
    projector.step(redis)
    assert (jobs.show(job).status, jobs.show(job).accuracy) == ("running", 0.9)
    about = {"token": token(1), "version": 1}
    feed.send(settled, **about, loss=0.5, accuracy=0.95, samples=360, error="no weights")
    projector.step(redis)
    shown = jobs.show(job)
    assert (shown.status, shown.accuracy) == ("completed", 0.9)
    assert shown.best_version == (1 if settled == "scored" else 2)
