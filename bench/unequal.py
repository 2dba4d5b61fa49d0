"""Measures how well real workers of equal and of unequal speed are used, and what backups waste.

    python -m bench.unequal --seconds 90

`quarter-N`: `local` with N replicas on four workers, three that take two seconds for a replica and one that takes
eight. They sleep that long in each replica, and compute next to nothing, so that the machine's cores are not the limit.
`equal-*`: two workers that compute. Figures: units per second; their share of the summed speed; the last worker's share
of the samples; samples begun by a second worker, per sample counted (backups waste at most that much); samples.
"""

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stage import Stage, stage
from bench.support.wait import wait_until
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.failpoints import VARIABLE as FAILPOINTS

SPEC: dict[str, Any] = {
    "name": "bench: unequal",
    "dataset": "digits",
    "model": "mlp",
    "micro_batch": 8,
    "rounds": 10_000_000,
    "threads": 1,
    "checkpoint_every": 0,
    "evaluate_every": 0,
}
QUARTER = (2.0, 2.0, 2.0, 8.0)
LEARNED = 3
"""Rounds before the measurement, in which the workers' speeds become known."""
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Case:
    """Each worker's seconds per unit (0: as long as it computes), and what the job has beside `SPEC`."""

    unit_s: tuple[float, ...]
    spec: dict[str, Any]


def _local(replicas: int, steps: int) -> dict[str, Any]:
    return {"strategy": {"kind": "local", "inner_steps": steps, "replicas": replicas}}


RESNET: dict[str, Any] = {"model": "resnet18", "input": [3, 32, 32], "micro_batch": 16, "micro_batches_per_round": 8}
CASES = {
    **{f"quarter-{replicas}": Case(QUARTER, _local(replicas, 1)) for replicas in (4, 8, 16)},
    "equal-sync": Case((0.0, 0.0), RESNET),
    "equal-local": Case((0.0, 0.0), {"model": "lenet5", "input": [1, 28, 28], "micro_batch": 32, **_local(8, 20)}),
}


def measure(up: Stage, case: Case, seconds: float) -> dict[str, float]:
    """Train a job of this case for so long, once the speeds are known."""
    workers = len(case.unit_s)
    spec = {**SPEC, **case.spec, "workers": {"min": workers, "max": workers}}
    job_id = up.create(spec)
    units = JobSpec.model_validate(spec).plan.units_per_round
    wait_until(lambda: up.job(job_id)["workers"] == workers, "all workers", PATIENCE_S)
    first = _next(up, job_id, LEARNED)
    began = time.monotonic()
    before = _figures(up, job_id, first)
    time.sleep(seconds)
    last = _next(up, job_id, _version(up, job_id) + 1)
    rate = (last - first) * units / (time.monotonic() - began)
    after = _figures(up, job_id, last)
    found = {name: after[name] - before[name] for name in after}
    up.call("POST", f"/v1/jobs/{job_id}/cancel")
    result = {"units/s": rate}
    if all(case.unit_s):
        result["share of speed"] = rate / sum(1 / unit_s for unit_s in case.unit_s)
    return result | {
        "last worker's": found["last"] / found["samples"],
        "twice": found["reassigned"] / found["counted"],
        "samples": found["counted"],
    }


def _version(up: Stage, job_id: str) -> int:
    state = up.rounds(job_id)
    return state.version if state else -1


def _next(up: Stage, job_id: str, version: int) -> int:
    """The newest version, at the moment when it is at least this one."""
    wait_until(lambda: _version(up, job_id) >= version, f"version {version}", PATIENCE_S, every_s=0.01)
    return _version(up, job_id)


def _figures(up: Stage, job_id: str, version: int) -> dict[str, float]:
    """Samples of all workers and of the last; of those in the ledger, counted and begun by a second worker."""
    wait_until(lambda: up.job(job_id)["version"] >= version, "the database", PATIENCE_S)
    rows = up.call("GET", f"/v1/jobs/{job_id}/workers")["items"]
    ledger = up.ledger(job_id)
    last = max(rows, key=lambda row: str(row["name"]))  # hand-3 of hand-0 to hand-3
    sums = {name: float(sum(epoch[name] for epoch in ledger)) for name in ("counted", "reassigned")}
    return {"samples": float(sum(row["samples"] for row in rows)), "last": float(last["samples"]), **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="of each case")
    parser.add_argument("--case", choices=CASES, action="append", help="this one alone; may be given several times")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    for name in options.case or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder, stage(Path(folder) / "home", workers=0) as up:
            for number, unit_s in enumerate(case.unit_s):
                slowed = f"after_compute=sleep:{unit_s}@*" if unit_s else ""
                up.workers.append(up.start_worker(number, **{FAILPOINTS: slowed}))
            found = measure(up, case, options.seconds)
        print(f"{name:<12}", ", ".join(f"{figure} {value:.3f}" for figure, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
