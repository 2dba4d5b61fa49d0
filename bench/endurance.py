"""Endurance: ten workers train a model while processes are killed or stopped; then the same job without faults.

    python -m bench.endurance --minutes 10 --workers 10

Every ten seconds a worker, a seat's process, the active reducer, the API or the broker gets SIGKILL, or SIGSTOP and
some seconds later SIGCONT. The job must complete with the same bits as the calm job, an exact ledger, no orphan
process, and no growth in the memory of reducers and API. Real MNIST is read from COMPUTESHARE_DATA.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.faults import Faults
from bench.stage import Stage, alive, stage
from bench.support.results import PRODUCT, RELIABILITY, ROOT, append, digest
from bench.support.wait import wait_until

EVERY_S = 10.0
PROBE_ROUNDS = 150
SHARE = 0.6
"""Expected rounds of a faulty run, as a fraction of a calm run's in the same time."""
PATIENCE_S = 1800.0
GROWTH = 1.15
"""The largest ratio of the last quarter's memory to the first quarter's that passes."""
KINDS = [f"{verb} {role}" for verb in ("kill", "stop") for role in ("worker", "seat", "reducer", "api", "broker")]


@dataclass
class Memory:
    """The resident memory of reducers and API, sampled about once a second: role to (time, pid, bytes)."""

    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    _taken: float = 0.0

    def sample(self, up: Stage) -> None:
        now = time.monotonic()
        if now - self._taken < 1:
            return
        self._taken = now
        for role in ("reducer", "api"):
            for pid in up.run_file().pids.get(role, []):
                process = alive(pid)
                try:
                    if process:
                        self.samples.setdefault(role, []).append((now, pid, process.memory_info().rss))
                except psutil.Error:
                    continue

    def report(self, role: str) -> dict[str, float]:
        """Median memory (MB) in the first and in the last quarter of the time, and their ratio."""
        samples = self.samples[role]
        first, last = samples[0][0], samples[-1][0]
        early = [rss for at, _, rss in samples if at <= first + (last - first) / 4]
        late = [rss for at, _, rss in samples if at >= last - (last - first) / 4]
        begin, end = statistics.median(early) / 1e6, statistics.median(late) / 1e6
        return {"first_mb": round(begin, 1), "last_mb": round(end, 1), "ratio": round(end / begin, 3)}


def spec(rounds: int, workers: int) -> dict[str, Any]:
    return {
        "name": "bench: endurance",
        "dataset": "mnist",
        "model": "simplenet",
        "micro_batch": 32,
        "micro_batches_per_round": workers,
        "rounds": rounds,
        "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
        "workers": {"min": 1, "max": workers},
        "threads": 1,
        "checkpoint_every": 200,
        "evaluate_every": 0,
    }


def rounds_per_second(up: Stage, workers: int) -> float:
    """Rounds per second of a calm job, once every worker takes part."""
    job_id = up.create(spec(100_000, workers))
    logs = f"; logs in {up.home / 'logs'}"
    wait_until(lambda: up.job(job_id)["workers"] >= workers, f"{workers} workers to take part{logs}", PATIENCE_S)
    before, began = up.job(job_id)["version"], time.monotonic()
    last = before + PROBE_ROUNDS
    wait_until(lambda: up.job(job_id)["version"] >= last, f"{PROBE_ROUNDS} rounds{logs}", PATIENCE_S)
    rate = (up.job(job_id)["version"] - before) / (time.monotonic() - began)
    up.call("POST", f"/v1/jobs/{job_id}/cancel")
    up.finish(job_id, PATIENCE_S)
    return float(rate)


def train(up: Stage, rounds: int, workers: int, faulty_s: float, kinds: list[str], seed: int) -> dict[str, Any]:
    """Train one job, with faults for the first `faulty_s` seconds; returns its results."""
    began, memory = time.monotonic(), Memory()
    job_id = up.create(spec(rounds, workers))
    faults = Faults(up, random.Random(seed), job_id, longest_stop_s=8.0)
    strike = began + EVERY_S

    def tick() -> None:
        nonlocal strike
        now = time.monotonic()
        memory.sample(up)
        up.tend()
        if faulty_s and now - began > faulty_s:
            faults.calm()
        elif faulty_s and now >= strike:
            strike += EVERY_S
            print(f"{now - began:6.0f} s  {faults.strike(kinds)}", flush=True)

    job = up.finish(job_id, faulty_s + PATIENCE_S, tick)
    faults.calm()
    ledger = up.ledger(job_id)
    return {
        "status": job["status"],
        "version": job["version"],
        "sha256": job["weights_sha256"],
        "accuracy": job["accuracy"],
        "seconds": round(time.monotonic() - began, 1),
        "faults": len(faults.told),
        "counted": sum(epoch["counted"] for epoch in ledger),
        "samples": sum(epoch["samples"] for epoch in ledger),
        "missing": sum(epoch["missing"] for epoch in ledger),
        "orphans": up.orphans(),
        "memory": {role: memory.report(role) for role in memory.samples},
    }


def judge(faulty: dict[str, Any], calm: dict[str, Any]) -> list[str]:
    """The violations of the requirements in the module's docstring; empty if there are none."""
    wrong = []
    for name, run in (("faulty", faulty), ("calm", calm)):
        if run["status"] != "completed":
            wrong.append(f"{name}: {run['status']}")
        if (run["counted"], run["missing"]) != (run["samples"], 0):
            wrong.append(f"{name}: counted {run['counted']} of {run['samples']}, missing {run['missing']}")
        if run["orphans"]:
            wrong.append(f"{name}: orphans {run['orphans']}")
        wrong += [f"{name}: memory of {role} {m}" for role, m in run["memory"].items() if m["ratio"] > GROWTH]
    if faulty["sha256"] != calm["sha256"]:
        wrong.append("the weights differ")
    return wrong


def table(faulty: dict[str, Any], calm: dict[str, Any]) -> str:
    lines = [f"{'':<26}{'faulty':>16}{'calm':>16}"]
    for name in ("status", "version", "seconds", "faults", "accuracy", "counted", "samples", "missing"):
        lines.append(f"{name:<26}{faulty[name]!s:>16}{calm[name]!s:>16}")
    lines.append(f"{'weights':<26}{str(faulty['sha256'])[:12]:>16}{str(calm['sha256'])[:12]:>16}")
    lines.append(f"{'orphans':<26}{len(faulty['orphans']):>16}{len(calm['orphans']):>16}")
    for role in sorted(set(faulty["memory"]) & set(calm["memory"])):
        for name in ("first_mb", "last_mb", "ratio"):
            values = [f"{run['memory'][role][name]:>16}" for run in (faulty, calm)]
            lines.append(f"{f'memory of {role}, {name}':<26}{''.join(values)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="of faults")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--rounds", type=int, help="of the job; default: so many that the faulty run takes this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these faults alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    data = os.environ.get("COMPUTESHARE_DATA") or str(ROOT.parent / "shared" / "data")
    with (
        tempfile.TemporaryDirectory() as folder,
        stage(Path(folder) / "home", options.workers, COMPUTESHARE_DATA=data) as up,
    ):
        rounds = options.rounds or round(rounds_per_second(up, options.workers) * 60 * options.minutes * SHARE)
        print(f"{rounds} rounds", flush=True)
        kinds = options.kind or KINDS
        faulty = train(up, rounds, options.workers, 60 * options.minutes, kinds, options.seed)
        calm = train(up, rounds, options.workers, 0, [], options.seed)
    wrong = judge(faulty, calm)
    entry = {"bench": "endurance", "workers": options.workers, "faulty": faulty, "calm": calm, "wrong": wrong}
    append(RELIABILITY, entry | {"sources": digest(PRODUCT)})
    print(table(faulty, calm))
    if wrong:
        print(json.dumps(wrong, indent=1))
        sys.exit(1)


if __name__ == "__main__":
    main()
