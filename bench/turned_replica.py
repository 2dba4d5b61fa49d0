"""The cost of one lying replica of five, or of another number, with `local`, by the way in which updates are combined,
and how often an honest update is suspected: the loss on the test split, in one process, no broker.

    python -m bench.turned_replica [--case digits lenet5 ...] [--combine mean huber] [--harm none turned thousandfold]
        [--audited] [--replicas 5] [--seeds 0 1 2] [--begin 0.5]

Prints a line of JSON per run. In each round another replica lies, from the share `--begin` of the rounds on. With
`--audited`, suspected updates are computed again, as with `audit`, until a wrong one is found and replaced, whose
machine is banned.
"""

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.local_loss import Harm, lasting, trained
from bench.support.small_gpt import ADAMW, GPT
from computeshare.settings import Settings

REPLICAS = 5
FIVE: dict[str, Any] = {"kind": "local", "replicas": REPLICAS, "inner_steps": 25}
AVERAGED = {"inner_optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9}, "outer_lr": 1, "outer_momentum": 0}
MNIST: dict[str, Any] = {"dataset": "mnist", "model": "lenet5", "micro_batch": 32, "evaluate_every": 0}
DIGITS: dict[str, Any] = {"dataset": "digits", "model": "mlp", "evaluate_every": 0}
SYNC = {"micro_batches_per_round": REPLICAS}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "digits": (28_740, {**DIGITS, "micro_batch": 6, "strategy": FIVE | {"inner_steps": 24}}),
    "digits-sync": (28_740, {**DIGITS, **SYNC, "micro_batch": 8}),
    "lenet5-sync": (60_000, {**MNIST, **SYNC}),
    "gpt-sync": (6_000, {**GPT, **SYNC, "micro_batch": 6, "optimizer": ADAMW}),
    "lenet5": (60_000, {**MNIST, "strategy": FIVE | AVERAGED}),
    "lenet5-diloco": (60_000, {**MNIST, "strategy": FIVE}),
    "gpt": (6_000, {**GPT, "micro_batch": 6, "strategy": FIVE | {"inner_optimizer": ADAMW}}),
}
"""Samples, and the JobSpec without its length."""
HARMS: Mapping[str, Harm | None] = {
    "none": None,
    "turned": np.negative,
    "tenfold": lambda update: update * np.float32(-10),
    "thousandfold": lambda update: update * np.float32(1000),
}


def of_round(document: dict[str, Any], replicas: int, combine: str) -> dict[str, Any]:
    """The changes to a JobSpec for another number of updates in a round."""
    workers = {"min": replicas, "max": replicas}
    if "strategy" not in document:
        strategy = {"kind": "sync", "combine": combine}
        return {"strategy": strategy, "micro_batches_per_round": replicas, "workers": workers}
    return {"strategy": document["strategy"] | {"replicas": replicas, "combine": combine}, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    combinations = ["mean", "median", "trimmed_mean", "huber"]
    parser.add_argument("--combine", nargs="+", choices=combinations, default=combinations)
    parser.add_argument("--harm", nargs="+", choices=HARMS, default=["none", "turned"])
    parser.add_argument("--audited", action="store_true")
    parser.add_argument("--begin", type=float, default=0.0, help="the share of the rounds after which the lies begin")
    parser.add_argument("--replicas", type=int, default=REPLICAS, help="in a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for case in args.case:
        samples, document = CASES[case]
        for seed in args.seeds:
            for combine in args.combine:
                changes = of_round(document, args.replicas, combine) | {"seed": seed}
                for harm in args.harm:
                    began = time.monotonic()
                    spec = lasting(document | changes, samples)
                    found = trained(spec, Settings().data_dir, HARMS[harm], args.audited, args.begin)
                    about = {"case": case, "combine": combine, "harm": harm, "audited": args.audited, "seed": seed}
                    about |= {"replicas": args.replicas, "begin": args.begin}
                    print(json.dumps({**about, **found, "seconds": round(time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    main()
