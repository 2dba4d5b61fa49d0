"""Measures a turn of the dispatcher with many jobs and workers: wall time, CPU time, commands to the broker.

    python -m bench.dispatcher --jobs 1000 --workers 200

The broker, the database and the dispatcher are real; workers are only registrations. Workers serve the oldest jobs (RQ
reports their seats as started), the other jobs wait. Medians of the turns once all workers have seats.
"""

import argparse
import json
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis

from api.database import Database
from api.jobs.service import Jobs
from api.scheduler.dispatcher import CALM_MS, Dispatcher
from api.system.background import DISPATCH_S
from computeshare.jobspec.spec import JobSpec, WorkerRange
from computeshare.queue import WorkerInfo, register
from computeshare.queue.seats import SeatJob
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker

QUEUE = "bench"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log", maxmemory_bytes=8_000_000_000)
        try:
            found = measure(connect(broker.url), Path(folder), arguments.jobs, arguments.workers, arguments.turns)
        finally:
            broker.stop()
    print(json.dumps(found))


def measure(redis: Redis, folder: Path, job_count: int, worker_count: int, turns: int) -> dict[str, float]:
    """Medians over `turns` turns: wall seconds, CPU seconds of this process, broker commands."""
    database = Database(f"sqlite:///{folder / 'computeshare.db'}")
    database.migrate()
    jobs = Jobs(database, folder / "artifacts")
    spec = JobSpec(dataset="digits", model="mlp", queue=QUEUE, workers=WorkerRange(min=1, max=1))
    for _ in range(job_count):
        jobs.create(spec)
    workers = [f"bench{secrets.token_hex(6)}" for _ in range(worker_count)]
    dispatcher = Dispatcher(database, folder / "artifacts")
    laps: list[tuple[float, float, float]] = []
    serving: dict[str, str] = {}
    calm_until = time.monotonic() + CALM_MS / 1000 + 1
    while len(laps) < turns:
        for worker in workers:
            register(redis, WorkerInfo(worker, worker, "cpu", (QUEUE,), {}, 1, "host", 1, serving.get(worker)))
        before = (time.perf_counter(), time.process_time(), commands_processed(redis))
        dispatcher.step(redis)
        after = (time.perf_counter(), time.process_time(), commands_processed(redis))
        serving = _begin_seats(redis, workers)
        if time.monotonic() > calm_until and len(serving) >= min(worker_count, job_count):
            laps.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
        time.sleep(DISPATCH_S)  # as the control plane does between turns
    database.close()
    names = ("turn_s", "cpu_s", "commands")
    return {name: round(statistics.median(lap[i] for lap in laps), 4) for i, name in enumerate(names)}


def commands_processed(redis: Redis) -> int:
    """The number of commands that the broker has processed since its start."""
    info: Any = redis.info("stats")
    return int(info["total_commands_processed"])


def _begin_seats(redis: Redis, workers: list[str]) -> dict[str, str]:
    """Mark the issued seats as started, as their workers would; returns worker to seat."""
    serving = {}
    for worker in workers:
        queued: Any = redis.lrange(f"rq:queue:{worker}", 0, -1)
        for seat in queued:
            serving[worker] = seat.decode()
            redis.hset(SeatJob.key_for(seat.decode()), "status", "started")
    return serving


if __name__ == "__main__":
    main()
