"""64 workers without models, on real sockets and scripts, with a fault in one of the workers every 0.2 s.

    python -m bench.fleet --minutes 10

The broker and the reducer are real; all workers submit one precomputed update, so that two cores suffice. Calm and
faulty periods alternate. The ledger, rebuilt from the events, must be exact: every micro-batch of every version counts
once. The result compares accepted submissions per second in faulty and in calm periods.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
from redis import Redis

from bench.fleet_worker import KINDS, Worker
from bench.support.results import RELIABILITY, append
from bench.support.wait import wait_until
from computeshare.codecs.messages import encode_update
from computeshare.codecs.registry import EXACT
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue.roster import ALIVE_MS
from computeshare.tensors.layout import Layout
from computeshare.transport.connections import connect
from computeshare.types import Token
from computeshare.up.embedded_broker import EmbeddedBroker

FAULT_S = 0.2
SETTLE_S = 2.0
"""Seconds at the start of each period that are not counted, because of effects of the period before."""
OPEN_S = 120.0
"""Time limit for a reducer to open the job."""
GOAL = 0.9


class Ledger:
    """Reads and trims a job's events, and records every micro-batch that is not counted exactly once."""

    def __init__(self, redis: Redis, job_id: str, plan: Plan) -> None:
        self.redis, self.name, self.plan = redis, JobKeys(job_id).events(), plan
        self.accepted: list[int] = []
        """The time of each accepted submission, in milliseconds by the broker's clock."""
        self.outcomes: Counter[str] = Counter()
        self.versions = 0
        self.wrong: list[str] = []
        self._received: Counter[int] = Counter()
        self._last = "0-0"

    def read(self, block_ms: int = 200) -> int:
        """Read the waiting events; returns their number."""
        reply: Any = self.redis.xread({self.name: self._last}, count=2000, block=block_ms)
        entries = reply[0][1] if isinstance(reply, list) and reply else []
        entries = next(iter(reply.values()))[0] if isinstance(reply, dict) and reply else entries
        for stream_id, fields in entries:
            self._take(fields[b"type"].decode(), int(fields[b"at"]), json.loads(fields[b"data"]))
            self._last = stream_id.decode()
        if entries:
            self.redis.xtrim(self.name, minid=self._last, approximate=False)
        return len(entries)

    def _take(self, kind: str, at_ms: int, data: dict[str, Any]) -> None:
        if kind == "submission":
            self.outcomes[data["outcome"]] += 1
            self._received.update(map(int, data["counted"]))
            if data["outcome"] == "accepted":
                self.accepted.append(at_ms)
        elif kind == "refused":
            self._received[data["micro_batch"]] -= 1
            self.wrong.append(f"refused: {data}")
        elif kind == "version":
            self._check(Token.parse(data["token"]), data["counted"])
        elif kind in ("banned", "failed"):
            self.wrong.append(f"{kind}: {data}")

    def _check(self, token: Token, counted: list[list[Any]]) -> None:
        """Check that a new version counts exactly its round's micro-batches, each received once."""
        self.versions += 1
        if token.version != self.versions:
            self.wrong.append(f"version {token.version} came as number {self.versions}")
        due = self.plan.round(token.version - 1)
        numbers = list(range(due.first, due.first + due.count))
        if [micro_batch for micro_batch, _, _ in counted] != numbers:
            self.wrong.append(f"version {token.version} counts {counted}")
        if [self._received.pop(m, 0) for m in numbers] != [1] * due.count:
            self.wrong.append(f"version {token.version}: received other than once each")


def load(
    url: str,
    job_id: str,
    message: Sequence[bytes],
    names: list[str],
    each_s: float,
    faulty: Event,
    stop: Event,
    dead: Any,
) -> None:
    """Run some workers in this process, a thread each; while `faulty` is set, one of them fails every `each_s`."""
    rng = random.Random(os.getpid())
    workers = [Worker(url, job_id, message, name, stop, dead) for name in names]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    while not stop.wait(each_s):
        if faulty.is_set():
            rng.choice(workers).fail_next(rng.choice(KINDS))
    for thread in threads:
        thread.join(10)


@contextmanager
def reducing(home: Path) -> Iterator[tuple[Redis, str]]:
    """A broker with a reducer until the end of the block: a connection, and the TCP address."""
    broker = EmbeddedBroker.start(home / "broker.log")
    environment = {**os.environ, "COMPUTESHARE_REDIS_URL": broker.url, "COMPUTESHARE_HOME": str(home)}
    with open(home / "reducer.log", "ab") as log:
        reducer = subprocess.Popen([sys.executable, "-m", "computeshare.reducer.process"], env=environment, stderr=log)
    try:
        yield connect(broker.url), broker.tcp_url
    finally:
        reducer.terminate()
        try:
            reducer.wait(20)
        except subprocess.TimeoutExpired:
            reducer.kill()
        broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--period", type=float, default=30, help="seconds of each calm and each faulty period")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    spec = JobSpec(
        name="bench: fleet",
        dataset="mnist",
        model="mlp",
        input=[1, 8, 8],
        micro_batch=1,
        micro_batches_per_round=options.workers,
        rounds=10_000_000,
        codec=CodecSpec(up="float32", down="float32"),
        checkpoint_every=0,
        evaluate_every=0,
    )
    with tempfile.TemporaryDirectory() as home, reducing(Path(home)) as (redis, url):
        result = measure(redis, url, spec, options)
    append(RELIABILITY, {"bench": "fleet", **result})
    print(json.dumps(result, indent=1))
    if result["wrong"] or result["ratio"] < GOAL:
        sys.exit(1)


def measure(redis: Redis, url: str, spec: JobSpec, options: argparse.Namespace) -> dict[str, Any]:
    """Run all periods; returns the results."""
    job_id = secrets.token_hex(4)
    rounds = RoundStore(redis, job_id)
    rounds.publish(spec.model_dump_json())
    message = ready_made(redis, rounds)
    context = multiprocessing.get_context("spawn")
    faulty, stop, dead = context.Event(), context.Event(), context.Queue()
    each_s = FAULT_S * options.processes
    names = [secrets.token_hex(6) for _ in range(options.workers)]
    shares = [names[i :: options.processes] for i in range(options.processes)]
    arguments = [(url, job_id, message, share, each_s, faulty, stop, dead) for share in shares]
    processes = [context.Process(target=load, args=each) for each in arguments]
    for process in processes:
        process.start()
    ledger = Ledger(redis, job_id, spec.plan)
    while ledger.versions < 5:
        ledger.read()
    periods = []
    burials = Burials(rounds, dead)
    for number in range(max(2, round(60 * options.minutes / options.period) // 2 * 2)):
        (faulty.set if number % 2 else faulty.clear)()
        periods.append(_period(ledger, burials, options.period))
        print(f"{'faulty' if number % 2 else 'calm  '} {periods[-1]:8.1f} accepted/s", flush=True)
    stop.set()
    while any(process.is_alive() for process in processes):
        ledger.read()
    rounds.end("cancelled")
    calm, hurt = periods[::2], periods[1::2]
    ratios = [b / a for a, b in zip(calm, hurt, strict=True)]
    return {
        "workers": options.workers,
        "minutes": round(len(periods) * options.period / 60, 1),
        "versions": ledger.versions,
        "outcomes": dict(ledger.outcomes),
        "calm_per_s": round(statistics.median(calm), 1),
        "faulty_per_s": round(statistics.median(hurt), 1),
        "ratio": round(statistics.median(hurt) / statistics.median(calm), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "wrong": ledger.wrong[:10],
    }


def ready_made(redis: Redis, rounds: RoundStore) -> list[bytes]:
    """An encoded update with the model's layout and small random values, once a reducer has opened the job."""
    name = rounds.keys.events()
    wait_until(lambda: rounds.read() is not None, "a reducer to open the job", OPEN_S)
    events: Any = redis.xrange(name)
    opened = next(json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"opened")
    vector = np.random.default_rng(0).normal(0, 1e-6, opened["parameters"]).astype(np.float32)
    layout = Layout.build(iter([("all", vector.shape, "parameter")]))
    return [bytes(part) for part in encode_update(EXACT, vector, np.zeros(0, np.float32), layout, 0)]


def _period(ledger: Ledger, burials: "Burials", seconds: float) -> float:
    """Accepted submissions per second in one period; ends the sessions of dead workers meanwhile."""
    began = time.monotonic()
    ledger.accepted.clear()
    while time.monotonic() < began + seconds:
        ledger.read()
        burials.tick()
    first = ledger.accepted[0] if ledger.accepted else 0
    counted = sum(at_ms >= first + 1000 * SETTLE_S for at_ms in ledger.accepted)
    return counted / (seconds - SETTLE_S)


class Burials:
    """Ends the sessions of dead workers after a delay, in place of the control plane."""

    def __init__(self, rounds: RoundStore, dead: Any) -> None:
        self._rounds, self._dead = rounds, dead
        self._waiting: list[tuple[float, str]] = []

    def tick(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._waiting.append((time.monotonic() + ALIVE_MS / 1000, self._dead.get_nowait()))
        for _, worker in [each for each in self._waiting if each[0] <= time.monotonic()]:
            self._rounds.remove_worker(worker, "not heard of any more")
        self._waiting = [each for each in self._waiting if each[0] > time.monotonic()]


if __name__ == "__main__":
    main()
