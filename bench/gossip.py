"""Compares strategy `gossip` with `sync`, and a language model trained so with `local`; all at equal samples.

    python -m bench.gossip [--epochs 2] [--every 5] [--only NAME...]
    python -m bench.gossip --gpt [--short] [--peers 4 8] [--every 25] [--samples 24000] [--only NAME...]

First form: MNIST `lenet5`, four workers, each interpolation. In the last run a worker is killed by SIGKILL at a third
of the job, and another joins in its place. Prints accuracy on the test set, samples per second, megabytes up and down,
the last consensus distance and how many samples do not count. `--gpt`: a small GPT on tinyshakespeare, `local` and
`gossip` with as many workers as replicas, or peers, and so many steps between exchanges. Prints the loss on the test
split, which is to be within 1 % of `local`'s, and the last consensus distance; also of peers that exchange nothing.
`--short`: an eighth of the samples and four peers, to see that it runs.
"""

import argparse
import json
import os
import signal
import threading
from typing import Any

from bench.local_loss import SAMPLES, job_of_gpt
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from bench.support.small_gpt import ADAMW
from bench.support.wait import wait_until
from computeshare.settings import Settings
from computeshare.types import ENDED

WORKERS, BATCH = 4, 32
SGD = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
PLAIN = {"outer_lr": 1, "outer_momentum": 0}
"""No outer step of its own: what a unit has changed is taken as it is."""
GOAL = 0.01
"""Of `local`'s loss: how much more may be that of `gossip`, with the GPT."""
BATCH_GPT = 3
COLUMNS = ("run", "accuracy, %", "samples/s", "MB up", "MB down", "consensus distance", "samples missing")


def compare_with_local(options: argparse.Namespace) -> Part:
    """The loss of a small GPT by strategy and number of peers."""
    rows: list[list[Cell]] = []
    told = []
    for peers in options.peers:
        local = {"kind": "local", "inner_steps": options.every, "replicas": peers, "outer_momentum": 0.8}
        gossip = {"kind": "gossip", "every": options.every, "buffer": peers}
        runs = {"local": local, "gossip": gossip}
        runs |= {"gossip, no outer step": gossip | PLAIN}
        runs |= {"gossip, no exchanges": gossip | {"fetch_probability": 0}}
        losses: dict[str, float] = {}
        with ours.plane(peers, Settings().data_dir) as plane:
            for name, strategy in runs.items():
                if losses and options.only and name not in options.only:
                    continue
                fields = {"strategy": {"inner_optimizer": ADAMW, **strategy}}
                document = job_of_gpt(fields, peers, options.every, BATCH_GPT, options.samples)
                found = ours.train(plane, document, scored=False)
                metrics = plane.client.metrics(found.job["id"])
                loss = metrics["test_loss"][-1]["value"]
                losses[name] = loss
                above = 100 * (loss / losses["local"] - 1)
                apart = [point["value"] for point in metrics["consensus"]][-1:] or [None]
                rows.append([peers, name, found.course.points[-1].samples, loss, above, *apart])
                print(json.dumps({"peers": peers, "run": name, "loss": loss, "above_percent": above}), flush=True)
        if found_loss := losses.get("gossip"):
            told.append(f"{peers} peers: {100 * (found_loss / losses['local'] - 1):+.1f} %")
    columns = ("peers", "run", "samples", "loss, nats per token", "above local, %", "consensus distance")
    title = f"GPT on tinyshakespeare, {options.every} steps between exchanges"
    summary = f"Loss of gossip beside local (goal: at most {100 * GOAL:+g} %): {', '.join(told)}"
    return Part([Table(title, columns, rows, summary)])


def document(strategy: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """A job of so many epochs; with `sync`, each worker computes one micro-batch of a round."""
    found: dict[str, Any] = {"dataset": "mnist", "model": "lenet5", "epochs": options.epochs, "micro_batch": BATCH}
    found |= {"evaluate_every": 0, "checkpoint_every": 0, "threads": 1, "workers": {"min": WORKERS, "max": WORKERS}}
    if strategy is None:
        return found | {"micro_batches_per_round": WORKERS, "optimizer": SGD}
    gossip = {"kind": "gossip", "every": options.every, "buffer": 4 * WORKERS, "inner_optimizer": SGD, **PLAIN}
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
    parser.add_argument("--gpt", action="store_true", help="compare a small GPT with local")
    parser.add_argument("--short", action="store_true", help="with --gpt: an eighth of the samples, four peers")
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8], help="with --gpt")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each run, with --gpt")
    parser.add_argument("--every", type=int, help="steps between exchanges; default: 5, with --gpt 25")
    parser.add_argument("--only", nargs="+", help="names of the runs; with --gpt, local runs in any case")
    options = parser.parse_args()
    options.every = options.every or (25 if options.gpt else 5)
    end_cleanly_when_asked()
    if options.gpt:
        if options.short:
            options.samples, options.peers = options.samples // 8, options.peers[:1]
        print(markdown(compare_with_local(options)))
        return
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
