"""The cost of a delay at equal samples: loss and accuracy on the test split, in one process, no broker.

    python -m bench.delay_loss [--case lenet5 gpt ...] [--delays 0 1] [--seeds 0 1 2] [--samples N]

Prints a line of JSON per run.
"""

import argparse
import json
import time
from typing import Any

from bench.local_loss import lasting, trained
from bench.support.small_gpt import ADAMW, GPT
from bench.thin_cases import RESNET
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.strategies.local import DELAYED

MNIST: dict[str, Any] = {"dataset": "mnist", "model": "lenet5", "micro_batch": 32, "evaluate_every": 0}
SGD: dict[str, Any] = {"name": "SGD", "lr": 0.02, "momentum": 0.9}
LOCAL: dict[str, Any] = {"kind": "local", "replicas": 2, "inner_steps": 50}
PLAIN = {"inner_optimizer": SGD, "outer_lr": 1, "outer_momentum": 0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "lenet5": (60_000, {**MNIST, "micro_batches_per_round": 2, "optimizer": SGD}),
    "lenet5-adam": (60_000, {**MNIST, "micro_batches_per_round": 2, "optimizer": {"name": "Adam", "lr": 1e-3}}),
    "lenet5-local": (60_000, {**MNIST, "strategy": LOCAL | PLAIN}),
    "lenet5-diloco": (60_000, {**MNIST, "strategy": LOCAL | {"inner_optimizer": SGD | {"momentum": 0}}}),
    "resnet18-local": (57_600, {**MNIST, **RESNET, "strategy": LOCAL | PLAIN}),
    "gpt": (6_000, {**GPT, "micro_batch": 6, "micro_batches_per_round": 2, "optimizer": ADAMW}),
    "gpt-local": (6_000, {**GPT, "micro_batch": 6, "strategy": LOCAL | {"inner_optimizer": ADAMW}}),
}
"""Samples, and the JobSpec without its length."""


def job(case: str, delay: int, seed: int, samples: int, changes: dict[str, Any]) -> JobSpec:
    """The JobSpec of a run on this many samples or a few more, with changes to fields or to objects of fields."""
    document = {**CASES[case][1], "seed": seed}
    for name, value in [*changes.items(), ("strategy", {"delay": delay})]:
        whole = isinstance(value, dict)
        document[name] = {**document.get(name, {}), **value} if whole else value
    if delay and "outer_lr" not in changes.get("strategy", {}):
        for name in DELAYED:
            document["strategy"].pop(name, None)  # the defaults with a delay
    return lasting(document, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, help="in place of the case's")
    parser.add_argument("--changes", type=json.loads, default={}, help="to the JobSpec, as JSON")
    args = parser.parse_args()
    for case in args.case:
        for seed in args.seeds:
            for delay in args.delays:
                began = time.monotonic()
                spec = job(case, delay, seed, args.samples or CASES[case][0], args.changes)
                found = trained(spec, Settings().data_dir)
                about = {"case": case, "delay": delay, "seed": seed, "changes": args.changes}
                print(json.dumps({**about, **found, "seconds": round(time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    main()
