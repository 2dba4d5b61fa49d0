"""A generated database for load tests of the pages: a job of very many versions and workers, and many other jobs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from api.database import Database, now_ms
from api.tables import Event, Job, LedgerEntry, Score, Submission, VersionRow, WorkerStat, table
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token

JOB = "longjob0"
ROUND_MS = 500
AT_ONCE = 5000
SPEC = JobSpec(
    name="a long one", dataset="mnist", model="lenet5", queue="many", rounds=10_000_000, micro_batches_per_round=8
)


def token(version: int) -> str:
    """A token for a generated version."""
    return str(Token(1, version, f"{version:016x}"))


def worker(number: int) -> str:
    return f"worker{number:02}"


def fill(database: Database, versions: int, workers: int, others: int) -> None:
    """Store a running job with this many versions and workers, and `others` jobs that have ended."""
    now = now_ms()
    began = now - versions * ROUND_MS
    with database.writing() as connection:
        connection.execute(insert(table(Job)), _job(JOB, "running", began, versions))
        if others:
            connection.execute(insert(table(Job)), _others(others, now))
        share = versions * SPEC.plan.units_per_round // workers
        connection.execute(insert(table(WorkerStat)), [_worker(number, began, now, share) for number in range(workers)])
    for rows in _in_parts(versions):
        with database.writing() as connection:
            _write(connection, rows, began, workers)


def _in_parts(versions: int) -> Iterator[range]:
    for start in range(1, versions + 1, AT_ONCE):
        yield range(start, min(start + AT_ONCE, versions + 1))


def _write(connection: Connection, numbers: range, began: int, workers: int) -> None:
    """Store versions with their ledger, events, scores and submissions, as the scripts and the projector would."""
    plan = SPEC.plan
    made, counted, sent, told, scored = [], [], [], [], []
    for version in numbers:
        at, base = began + version * ROUND_MS, plan.round(version - 1)
        about = {"job_id": JOB, "token": token(version), "incarnation": 1, "version": version}
        loss = 2.3 * math.exp(-version / 3000) + 0.05 + 0.02 * math.sin(version)
        made.append(
            about
            | {"epoch": base.epoch, "loss": loss, "sha256": "0" * 64, "samples": base.samples, "samples_per_s": 512.0}
            | {"bytes_up": 90_000 * version, "bytes_down": 250_000 * version, "at_ms": at, "voided": False}
        )
        for unit in base.units:
            who = worker(unit % workers)
            about_unit = {"micro_batch": unit, "epoch": base.epoch, "worker": who, "samples": 32, "voided": False}
            counted.append(about | about_unit | {"staleness": 0})
            sent.append(_submission(version, unit, who, at))
        told.append({"job_id": JOB, "type": "version", "at_ms": at, "data": {"version": version, "loss": loss}})
        if version % 100 == 0:
            score = {"loss": loss, "accuracy": 1 - loss / 3, "samples": 10_000, "at_ms": at, "voided": False}
            scored.append(about | score)
    for model, rows in ((VersionRow, made), (LedgerEntry, counted), (Event, told), (Score, scored)):
        if rows:
            connection.execute(insert(table(model)), rows)
    connection.execute(insert(table(Submission)), sent[-2000:])


def _submission(version: int, unit: int, who: str, at: int) -> dict[str, Any]:
    versions = {"base_version": version - 1, "current_version": version - 1, "at_ms": at, "voided": False}
    seconds = {"waiting_s": 0.1, "computing_s": 0.3, "encoding_s": 0.02, "uploading_s": 0.05}
    about = {"job_id": JOB, "stream_id": f"{at}-{unit}", "worker": who, "nonce": f"n{unit}", "outcome": "accepted"}
    held = {"micro_batches": [unit], "samples": 32, "bytes_up": 11_000, "bytes_down": 31_000}
    return {**about, **versions, **seconds, **held}


def _worker(number: int, began: int, now: int, share: int) -> dict[str, Any]:
    about = {"job_id": JOB, "worker": worker(number), "name": f"machine {number}", "device": "Apple M2 (MPS)"}
    times = {"joined_ms": began, "seen_ms": now}
    return {**about, **times, "samples": 32 * share, "samples_per_s": 8.0, "accepted": share, "session": f"s{number}"}


def _job(job_id: str, status: str, created: int, version: int) -> dict[str, Any]:
    spec = json.loads(SPEC.model_dump_json())
    about = {"id": job_id, "name": SPEC.name, "queue": SPEC.queue, "status": status, "spec": spec}
    times = {"created_ms": created, "started_ms": created, "updated_ms": created}
    figures = {"version": version, "rounds_total": SPEC.rounds_total, "token": token(version), "incarnation": 1}
    figures |= {"epoch": version // SPEC.plan.rounds_per_epoch, "loss": 0.07, "samples_per_s": 512.0}
    scores = {"accuracy": 0.98, "scored_version": version, "best_version": version, "best_accuracy": 0.98}
    return {**about, **times, **figures, **scores}


def _others(count: int, now: int) -> list[dict[str, Any]]:
    ended = ("completed", "failed", "cancelled")
    return [
        _job(f"o{number:07}", ended[number % 3], now - 60_000 * number, 100)
        | {"purged_ms": now, "finished_ms": now, "name": f"job {number}"}
        for number in range(count)
    ]


def database_in(home: Path) -> Database:
    """A new database in a home folder."""
    database = Database(f"sqlite:///{home / 'computeshare.db'}")
    database.migrate()
    return database
