"""Measures reads of a long job: the page's queries on a generated database of 100,000 versions.

python -m bench.ledger --versions 100000
"""

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import update
from starlette.testclient import TestClient

from api.database import Database
from api.jobs.service import Jobs
from api.main import create_app
from api.projection.events.handlers import apply
from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import StreamEvent
from api.projection.rates import JobRates
from api.projection.row_store import load_job, store_changes
from api.tables import JOB
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings

WORKERS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
SECONDS = {"waiting": 0.1, "computing": 0.2, "encoding": 0.01, "uploading": 0.02}
LAPS = ("combine", "step", "encode")
BATCH = 200


def digest(version: int) -> str:
    """A sha256 in place of a version's weights."""
    return hashlib.sha256(str(version).encode()).hexdigest()


def token_of(version: int) -> str:
    return f"1.{version}.{digest(version)[:16]}"


def events(job_id: str, plan: Any, first: int, last: int) -> list[StreamEvent]:
    """The events of the versions after `first` up to `last`, with a checkpoint and its score every 100 versions."""
    found = []
    for version in range(first + 1, last + 1):
        done, token, base = plan.round(version - 1), token_of(version), token_of(version - 1)
        rng = random.Random(version)
        at_ms = 1_700_000_000_000 + 100 * version + rng.randrange(20)
        counted = []
        for m in range(done.first, done.first + done.count):
            worker = WORKERS[rng.randrange(2)]
            counted.append([m, worker, plan.size(m)])
            data: dict[str, Any] = {
                "outcome": "accepted",
                "current": base,
                "base": base,
                "counted": [m],
                "worker": worker,
            }
            data |= {"nonce": f"n{m}", "micro_batches": [m], "bytes_up": 1, "bytes_down": 1, "seconds": SECONDS}
            found.append(StreamEvent(f"{at_ms}-{m - done.first}", "submission", at_ms, data))
        about = {"token": token, "version": version, "sha256": digest(version)}
        seconds = {name: round(rng.uniform(0.0005, 0.02), 6) for name in LAPS}
        rest = {"epoch": done.epoch, "loss": rng.random(), "counted": counted, "seconds": seconds}
        found.append(StreamEvent(f"{at_ms}-90", "version", at_ms, about | rest))
        if version % 100 == 0:
            found.append(StreamEvent(f"{at_ms}-91", "checkpoint", at_ms, about | {"bytes": 400}))
            score = {"loss": 0.5, "accuracy": 0.9, "samples": 360}
            found.append(StreamEvent(f"{at_ms}-92", "scored", at_ms, about | score))
    return found


def fill(database: Database, job_id: str, versions: int) -> float:
    """Store `versions` versions as the projector does; returns CPU milliseconds per 100 events."""
    rates, took, count = JobRates(), 0.0, 0
    for first in range(0, versions, BATCH):
        with database.writing() as connection:
            state = load_job(connection, job_id)
            assert state is not None
            batch = events(job_id, state.plan, first, min(versions, first + BATCH))
            started = time.process_time()
            projection = JobProjection(state, rates)
            for event in batch:
                apply(projection, event)
            projection.finish(lambda: True)
            store_changes(connection, state, projection.changes, state["status"])
            took, count = took + time.process_time() - started, count + len(batch)
    return 100_000 * took / count


def median_ms(ask: Callable[[], Any], times: int = 7) -> float:
    """Median milliseconds of a call."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        ask()
        took.append(time.perf_counter() - started)
    return round(1000 * statistics.median(took), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--dataset", default="digits", help="mnist has 469 rounds an epoch, digits 12")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder), redis_url="unix:///nowhere", token="secret")
        app = create_app(settings)
        client = TestClient(app, base_url="http://localhost", headers={"Authorization": "Bearer secret"})
        database = app.state.services.database
        database.migrate()
        spec = JobSpec(dataset=options.dataset, model="mlp", rounds=options.versions + 1)
        job_id = Jobs(database, settings.artifacts_dir).create(spec).id
        with database.writing() as connection:
            connection.execute(update(JOB).values(status="running"))
        result: dict[str, Any] = {
            "versions": options.versions,
            "cpu_ms_per_100_events": fill(database, job_id, options.versions),
        }
        for row in app.state.services.history.checkpoints(job_id).items:
            raise SystemExit(f"a checkpoint without its file was offered: {row.version}")

        def ask(path: str) -> None:
            client.get(path).raise_for_status()

        paths = {"ledger": f"/v1/jobs/{job_id}/ledger", "parts": f"/jobs/{job_id}/parts"}
        paths |= {"parts with table": f"/jobs/{job_id}/parts?table=true", "page": f"/jobs/{job_id}"}
        for name, path in paths.items():
            result[f"{name} ms"] = median_ms(partial(ask, path))
        print(json.dumps(result))
        database.close()


if __name__ == "__main__":
    main()
