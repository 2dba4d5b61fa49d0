"""Measures scaling over 1, 2, 4 ... 64 workers: throughput, CPU of reducer and broker, memory of the reducer.

    python -m bench.scaling --seconds 5 --times 5

Workers without a model (see `bench.fleet`) push precomputed updates, each over a connection of its own; broker and
reducer are real. Every round has the same number of micro-batches for any number of workers, so that only the cost of
the workers' number can change the reducer's cost of a round. The numbers of workers take turns, so that load on the
machine affects all of them alike; of each number, the run with the median cost for the reducer counts.
"""

import argparse
import json
import multiprocessing
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis import Redis

from bench.fleet import OPEN_S, Ledger, load, reducing
from bench.memory import forget_peak, peak
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Plot, Table, markdown
from bench.support.wait import wait_until
from computeshare.codecs.messages import encode_update
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.protocol.round_store import RoundStore

COUNTS = (1, 2, 4, 8, 16, 32, 64)
WARM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement with one number of workers. CPU in seconds, memory in bytes."""

    workers: int
    seconds: float
    versions: int
    updates: int
    update_bytes: int
    reducer_cpu_s: float
    broker_cpu_s: float
    workers_cpu_s: float
    reducer_peak: int

    @property
    def reducer_ms_per_update(self) -> float:
        return 1000 * self.reducer_cpu_s / self.updates

    @property
    def broker_share(self) -> float:
        """The broker's fraction of the CPU time of broker and reducer."""
        return self.broker_cpu_s / (self.broker_cpu_s + self.reducer_cpu_s)


def update_of(spec: JobSpec) -> list[bytes]:
    """An encoded update with the model's layout and small random values."""
    from computeshare.tasks.registry import task_of

    layout = task_of(spec).layout()
    vector = np.random.default_rng(0).normal(0, 1e-4, layout.parameters).astype(np.float32)
    buffers = np.zeros(layout.buffers, np.float32)
    return [bytes(part) for part in encode_update(CODECS[spec.codecs.up], vector, buffers, layout, 0)]


def measure(
    redis: Redis,
    url: str,
    reducer: psutil.Process,
    spec: JobSpec,
    message: Sequence[bytes],
    workers: int,
    seconds: float,
) -> Measured:
    """Measure one job with this many workers. Raises TimeoutError: no versions; RuntimeError: the ledger is wrong."""
    job_id = secrets.token_hex(4)
    broker = psutil.Process(redis.info("server")["process_id"])
    context = multiprocessing.get_context("spawn")
    faulty, stop, dead = context.Event(), context.Event(), context.Queue()  # faults never come
    names = [secrets.token_hex(6) for _ in range(workers)]
    pushing = context.Process(target=load, args=(url, job_id, message, names, 1.0, faulty, stop, dead))
    forget_peak(reducer.pid)
    rounds = RoundStore(redis, job_id)
    rounds.publish(spec.model_dump_json())
    pushing.start()
    try:
        ledger = Ledger(redis, job_id, spec.plan)
        _read_until(ledger, WARM_ROUNDS)
        versions, before, began = ledger.versions, cpu_s(reducer, broker, pushing), time.monotonic()
        while time.monotonic() < began + seconds or ledger.versions == versions:
            ledger.read()
        took, after, most = time.monotonic() - began, cpu_s(reducer, broker, pushing), peak(reducer.pid)
    finally:
        _end(rounds, pushing, stop)
    if ledger.wrong:
        raise RuntimeError(f"the ledger is not exact: {ledger.wrong[:3]}")
    made = ledger.versions - versions
    cpu = dict(zip(("reducer_cpu_s", "broker_cpu_s", "workers_cpu_s"), map(sub, after, before), strict=True))
    updates, size = made * spec.micro_batches_per_round, sum(map(len, message))
    return Measured(workers, took, made, updates, size, reducer_peak=most, **cpu)


def idle_reducer(redis: Redis, url: str, spec: JobSpec) -> tuple[psutil.Process, int]:
    """The reducer's process, and its resident bytes while it waits for work, after a job with a tiny model."""
    found = next(child for child in psutil.Process().children() if "computeshare.reducer.process" in child.cmdline())
    tiny = spec.model_copy(update={"model": "mlp", "input": (1, 8, 8)})
    measure(redis, url, found, tiny, update_of(tiny), 1, 0)
    return found, forget_peak(found.pid)


def cpu_s(*processes: Any) -> list[float]:
    """CPU seconds of each process so far, user and system."""
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return [each.user + each.system for each in times]


def _read_until(ledger: Ledger, versions: int) -> None:
    def there() -> bool:
        ledger.read()
        return ledger.versions >= versions

    wait_until(there, f"version {versions}", OPEN_S, every_s=0)


def _end(rounds: RoundStore, pushing: Any, stop: Any) -> None:
    rounds.end("cancelled")
    stop.set()
    pushing.join(30)
    if pushing.is_alive():
        pushing.kill()
        pushing.join()


def middle(runs: Sequence[Measured]) -> list[Measured]:
    """For each number of workers, the run with the median of the reducer's CPU time per update."""
    by_workers = {run.workers: [each for each in runs if each.workers == run.workers] for run in runs}
    return [sorted(some, key=lambda run: run.reducer_ms_per_update)[len(some) // 2] for some in by_workers.values()]


def tell(spec: JobSpec, runs: list[Measured], idle: int) -> Part:
    """A table with a row for each number of workers, and two plots."""
    found = middle(runs)
    columns = ["workers", "rounds/s", "updates/s", "MB/s in", "reducer, CPU ms an update", "reducer, CPU ms a MB"]
    columns += ["broker's share of the CPU", "reducer's memory above idle, model sizes"]
    rows: list[list[Cell]] = []
    for m in found:
        mb = m.updates * m.update_bytes / 1e6
        rates = [m.versions / m.seconds, m.updates / m.seconds, mb / m.seconds]
        costs = [m.reducer_ms_per_update, 1000 * m.reducer_cpu_s / mb, m.broker_share]
        rows.append([m.workers, *rates, *costs, (m.reducer_peak - idle) / (4 * spec.parameters)])
    costs = [m.reducer_ms_per_update for m in found if m.workers > 1]
    spread = (
        f" From 2 workers on the reducer's CPU an update differs by {max(costs) / min(costs) - 1:.0%}." if costs else ""
    )
    note = f"Rounds of {spec.micro_batches_per_round} updates of {found[0].update_bytes:,} bytes.{spread}"
    title = f"Workers without a model, {spec.model} with {spec.codecs.up}"
    throughput = {"updates": [(m.workers, m.updates / m.seconds) for m in found]}
    cpu = {"reducer": [(m.workers, m.reducer_ms_per_update) for m in found]}
    cpu["broker"] = [(m.workers, 1000 * m.broker_cpu_s / m.updates) for m in found]
    name = f"scaling-{spec.model}"
    plots = [
        Plot(f"{name}-throughput", "Updates per second", "workers", "updates/s", throughput, True),
        Plot(f"{name}-cpu", "CPU for an update", "workers", "ms", cpu, True),
    ]
    return Part([Table(title, columns, rows, note)], plots, {name: [asdict(m) for m in runs]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--seconds", type=float, default=5, help="for each number of workers, each time")
    parser.add_argument("--times", type=int, default=5, help="how often each number of workers is measured")
    parser.add_argument("--micro-batches", type=int, default=max(COUNTS), help="of each round")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--input", type=int, nargs=3)
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    spec = JobSpec(
        name="bench: scaling",
        dataset="mnist",
        model=options.model,
        input=options.input,
        micro_batch=2,
        micro_batches_per_round=options.micro_batches,
        rounds=10_000_000,
        codec=CodecSpec(up=options.codec, down="float32"),
        checkpoint_every=0,
        evaluate_every=0,
    )
    message, runs = update_of(spec), []
    with tempfile.TemporaryDirectory() as home, reducing(Path(home)) as (redis, url):
        reducer, idle = idle_reducer(redis, url, spec)
        for workers in options.times * list(options.workers):
            runs.append(measure(redis, url, reducer, spec, message, workers, options.seconds))
            print(json.dumps(asdict(runs[-1])), file=sys.stderr, flush=True)
    part = tell(spec, runs, idle)
    print(markdown(part))
    if options.json:
        part.save(options.json)


if __name__ == "__main__":
    main()
