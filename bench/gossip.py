"""Compares strategy `gossip` with `sync`: MNIST `lenet5`, four workers, equal samples; each interpolation.

    python -m bench.gossip [--epochs 2] [--every 5] [--only NAME...]

In the last run a worker is killed by SIGKILL at a third of the job, and another joins in its place. Prints accuracy on
the test set, samples per second, megabytes up and down, the last consensus distance and how many samples do not count.
"""

import argparse
import json
import os
import signal
import threading
from typing import Any

from bench import ours
from bench.ending import end_cleanly_when_asked
from bench.report import Cell, Part, Table, markdown
from bench.wait import wait_until
from computeshare.settings import Settings
from computeshare.types import ENDED

WORKERS, BATCH = 4, 32
SGD = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
COLUMNS = ("run", "accuracy, %", "samples/s", "MB up", "MB down", "consensus distance", "samples missing")


def document(strategy: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """A job of so many epochs; with `sync`, each worker computes one micro-batch of a round."""
    found: dict[str, Any] = {"dataset": "mnist", "model": "lenet5", "epochs": options.epochs, "micro_batch": BATCH}
    found |= {"evaluate_every": 0, "checkpoint_every": 0, "threads": 1, "workers": {"min": WORKERS, "max": WORKERS}}
    if strategy is None:
        return found | {"micro_batches_per_round": WORKERS, "optimizer": SGD}
    gossip = {"kind": "gossip", "every": options.every, "buffer": 4 * WORKERS, "inner_optimizer": SGD}
    return found | {"strategy": gossip | strategy}


def run(plane: ours.Plane, name: str, spec: dict[str, Any], faults: bool = False) -> list[Cell]:
    """Train a job to its end; with faults, one worker dies and another joins."""
    created = plane.client.create({"queue": ours.QUEUE, **spec, "name": name})
    if faults:
        threading.Thread(target=disturb, args=(plane, created["id"]), daemon=True).start()
    job = ours.ended(plane.client, created["id"], None)
    metrics = plane.client.metrics(job["id"])
    rate = [point["value"] for point in metrics["samples_per_s"]]
    apart = [point["value"] for point in metrics["consensus"]]
    missing = sum(epoch["samples"] - epoch["counted"] for epoch in plane.client.ledger(job["id"]))
    print(
        json.dumps({"run": name, "accuracy": job["accuracy"], "consensus": apart[-1:], "missing": missing}), flush=True
    )
    moved = [job[way] / 1e6 for way in ("bytes_up", "bytes_down")]
    return [name, 100 * job["accuracy"], sorted(rate)[len(rate) // 2], *moved, apart[-1] if apart else None, missing]


def disturb(plane: ours.Plane, job_id: str) -> None:
    """Kill a worker's processes at a third of the job; `up` starts another at once, which joins."""

    def has_come(share: float) -> bool:
        job = plane.client.show(job_id)
        return job["status"] in ENDED or job["version"] >= share * job["rounds_total"]

    wait_until(lambda: has_come(1 / 3), "a third of the job", 3600)
    os.kill(plane.pids()["worker"][0], signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=5, help="steps between exchanges")
    parser.add_argument("--only", nargs="+", help="names of the runs")
    options = parser.parse_args()
    end_cleanly_when_asked()
    runs: dict[str, dict[str, Any] | None] = {
        "sync": None,
        **{f"gossip, {kind}": {"interpolation": kind} for kind in ("constant", "clock", "loss")},
        "gossip, pairs": {"matching": "pairs"},
        "gossip, no exchanges": {"fetch_probability": 0},
        "gossip, one killed, one joins": {},
    }
    rows = []
    with ours.plane(WORKERS, Settings().data_dir) as plane:
        for name, strategy in runs.items():
            if not options.only or name in options.only:
                rows.append(run(plane, name, document(strategy, options), name.endswith("joins")))
    title = f"MNIST, lenet5, {WORKERS} workers, {options.epochs} epochs"
    print(markdown(Part([Table(title, COLUMNS, rows)])))


if __name__ == "__main__":
    main()
