"""The control plane is killed between SQLite and the broker; the one started next completes what was begun, once.

Each trial runs the real service, outbox and dispatcher in a process of their own, which SIGKILLs itself at a named
point. COMPUTESHARE_KILL_POINTS says how many trials each point gets.
"""

import multiprocessing
import os
import random
import secrets
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.jobs.job_list import Chosen
from api.jobs.service import Jobs
from api.publication.outbox import OUTBOX
from api.tables import IdempotencyKey, table
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from tests.support.outbox_trial import POINTS, PRELOADED, serve
from tests.support.scheduling_clock import online, queued, seats

TRIALS, SEED = int(os.environ.get("COMPUTESHARE_KILL_POINTS", "5")), int(os.environ.get("COMPUTESHARE_SEED", "0"))


def run(*arguments: Any) -> int:
    """Run `serve` in a process of its own; returns its exit code (negative: the signal that killed it)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=serve, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.timeout(120 + 5 * TRIALS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.slow
def test_killed_between_sqlite_and_the_broker_there_is_one_job_with_its_seats_once(
    point: str, redis: Redis, redis_url: str, migrated: Path, tmp_path: Path
) -> None:
    seeded = random.Random(f"{point} {SEED}")
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        database = Database(f"sqlite:///{shutil.copy(migrated, folder)}")
        queue = f"q{secrets.token_hex(4)}"
        workers = sorted(online(redis, queue) for _ in range(seeded.randint(1, 3)))
        for worker in workers:
            redis.persist(keys.worker(worker))  # a trial on a busy machine may take longer than a heartbeat lasts
        times = seeded.randint(1, len(workers)) if point == "after a seat is handed over" else 1
        arguments = (database.url, redis_url, str(folder), queue)
        assert run(*arguments, point, times) == -signal.SIGKILL, f"{point}, trial {trial}: it did not die there"
        if seeded.random() < 0.3:  # and again, wherever it gets this time
            assert run(*arguments, point, 1) in (-signal.SIGKILL, 0)
        assert run(*arguments, None, 0) == 0
        check(database, redis, queue, workers)
        database.close()
        redis.delete(*(keys.worker(worker) for worker in workers))


def check(database: Database, redis: Redis, queue: str, workers: list[str]) -> None:
    """One job, published; one seat for each worker, handed over once; nothing left to deliver."""
    with database.engine.connect() as connection:
        (job,) = Jobs(database, Path()).list(Chosen(queue=queue)).items
        (known,) = connection.execute(select(table(IdempotencyKey))).all()
        waiting = connection.execute(select(OUTBOX).where(OUTBOX.c.done_ms.is_(None))).all()
    assert known.job_id == job.id and waiting == []
    assert redis.exists(JobKeys(job.id).spec()) and redis.sismember("cs:jobs", job.id)
    held = seats(database)
    assert sorted(seat.worker for seat in held) == workers and {seat.state for seat in held} == {"issued"}
    assert [queued(redis, seat.worker) for seat in held] == [[seat.id] for seat in held]
    handed_over: Any = redis.hgetall(JobKeys(job.id).seats())
    assert {worker.decode(): seat.decode() for worker, seat in handed_over.items()} == {s.worker: s.id for s in held}
