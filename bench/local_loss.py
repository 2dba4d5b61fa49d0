"""The loss that local steps cost: `gpt` on tinyshakespeare with `local` at equal samples, in one process, no broker.

    python -m bench.local_loss [--steps 0 10 50] [--seeds 0 1 2] [--states restart kept] [--outer LR MOMENTUM]
    python -m bench.local_loss --replicas 2 --batch 6 --states kept --outer 1 0 --inner '{"lr": 0.003}' --steps 50

Prints a line of JSON per run: the loss on the test split, in nats. 0 steps is `sync` with nanoGPT's setting for a CPU,
12 samples a round. `local` has four replicas or another number, each with a warm-up of 100 steps. The second command is
local SGD as torch's users write it: a mean of two ranks' weights after every 50 steps.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.support.small_gpt import ADAMW, GPT
from bench.thin_cases import codec
from computeshare.codecs.messages import UpdateEncoder, decode_update, feedback_of
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.reducer.audits.outliers import suspected_in
from computeshare.settings import Settings
from computeshare.strategies.averages import products
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
from computeshare.training.server_step import ServerStep
from computeshare.training.work_units import AnyReplica
from computeshare.types import Vector
from computeshare.worker.seat.overlap.overlapped_replica import OverlappedReplica

SAMPLES, WARMUP = 24_000, 100
Harm = Callable[[Vector], Vector]


def trained(
    spec: JobSpec, data: Path, harm: Harm | None = None, audited: bool = False, begin: float = 0.0
) -> dict[str, Any]:
    """Train a job's rounds in this process; the score of its last version. Updates and versions go through the job's
    codecs. A kept inner state, and a residual, stay with their replica's place in the round. `harm` is done to the
    update of another unit of each round in turn, after a share `begin` of the rounds.

    `audited`: suspected updates are computed again, and the first wrong one ends the harm; with how many were wrong
    (`replaced`, `missed`) or right (`cleared`).
    """
    torch.set_num_threads(1)
    instance = task_of(spec).instance(spec.seed, "train", data)
    server = ServerStep(spec, instance.layout)
    model = server.publish_whole(server.load(weights_of(instance.module, instance.layout), b""))[1]
    places = spec.plan.units_per_round if spec.strategy.keeps_inner else 1
    recent = deque([model.published], maxlen=spec.strategy.recent)
    replicas: list[AnyReplica] = [
        replica_of(spec, task_of(spec).instance(spec.seed, "train", data), torch.device("cpu")) for _ in range(places)
    ]
    if overlap := spec.strategy.early_steps:
        about = overlap, spec.plan, instance.layout, lambda version, load, goes_on: load(recent[-1])
        replicas = [OverlappedReplica(one, *about) for one in replicas]
    up, layout = CODECS[spec.codecs.up], instance.layout
    senders = [UpdateEncoder(up, layout, feedback_of(up, layout)) for _ in range(spec.plan.units_per_round)]
    again = {"replaced": 0, "missed": 0, "cleared": 0} if audited else {}
    samples = 0
    for version in range(spec.rounds_total):
        work = spec.round_from(version)
        updates = []
        for place, unit in enumerate(work.units):
            replica = replicas[place % places]
            replica.load(recent[0])
            update = replica.compute(unit)
            vector = update.vector
            is_harmed = version >= begin * spec.rounds_total and place == version % len(work.units)
            if harm and is_harmed and not again.get("replaced"):
                vector = harm(vector)
                again |= {"missed": again["missed"] + 1} if audited else {}
            updates.append((vector, update.buffers))
        if audited:
            for row in suspected_in(products(np.stack([vector for vector, _ in updates]))):
                right = replicas[row % places].compute(work.units[row])
                same = np.array_equal(right.vector, updates[row][0])
                again["cleared" if same else "replaced"] += 1
                again["missed"] -= not same
                updates[row] = right.vector, right.buffers
        received = [
            decode_update(up, sender.whole(*update, spec.plan.generator_seed(unit)), layout)
            for sender, update, unit in zip(senders, updates, work.units, strict=False)
        ]
        model = server.step(version + 1, model, received, [spec.plan.unit_size(unit) for unit in work.units])
        recent.append(model.published)
        samples += work.samples
    result = score(task_of(spec).instance(spec.seed, "test", data), model.published)
    return {"loss": round(result.loss, 4), **result.metrics, "samples": samples, "rounds": spec.rounds_total, **again}


def job(steps: int, seed: int, state: str, args: argparse.Namespace) -> JobSpec:
    """The JobSpec of a run that trains on `SAMPLES` samples or a few more."""
    whole: dict[str, Any] = {**GPT, "seed": seed}
    if steps:
        inner = {"inner_steps": steps, "inner_optimizer": ADAMW | args.inner, "inner_state": state}
        inner |= {"overlap": args.overlap}
        outer = {"outer_lr": args.outer[0], "outer_momentum": args.outer[1]}
        whole |= {"strategy": {"kind": "local", "replicas": args.replicas, **inner, **outer}, "micro_batch": args.batch}
        whole |= codec(*args.codec) if args.codec else {}
    else:
        whole |= {"micro_batch": 6, "micro_batches_per_round": 2, "optimizer": ADAMW}
    whole["schedule"] = {"name": "cosine", "warmup": WARMUP / max(steps, 1), "final": 0.1}
    return lasting(whole, SAMPLES)


def job_of_gpt(fields: dict[str, Any], workers: int, steps: int, batch: int, samples: int) -> dict[str, Any]:
    """A job of the small GPT, by so many workers, on this many samples or a few more. `steps`: of a unit of work."""
    found = {**GPT, "micro_batch": batch, "threads": 1, "checkpoint_every": 0, **fields}
    found["workers"] = {"min": workers, "max": workers}
    found["schedule"] = {"name": "cosine", "warmup": WARMUP / steps, "final": 0.1}
    return found | {"rounds": lasting(found, samples).rounds}


def lasting(document: dict[str, Any], samples: int) -> JobSpec:
    """The JobSpec of a document without a length, for as many rounds as take this many samples or a few more."""
    plan = JobSpec.model_validate({**document, "rounds": 1}).plan
    rounds = taken = 0
    while taken < samples:
        taken += plan.round(rounds).samples
        rounds += 1
    return JobSpec.model_validate({**document, "rounds": rounds})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 10, 25, 50, 100, 200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--states", nargs="+", choices=("restart", "kept"), default=["restart"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--overlap", type=int, default=0, help="steps from where a replica's last unit ended")
    parser.add_argument("--codec", nargs="+", help="up and down, or for both; by default those of a JobSpec")
    parser.add_argument("--batch", type=int, default=3, help="samples of an inner step")
    parser.add_argument("--outer", type=float, nargs=2, default=(0.7, 0.9), metavar=("LR", "MOMENTUM"))
    parser.add_argument("--inner", type=json.loads, default={}, help="changes to the inner optimizer, as JSON")
    args = parser.parse_args()
    for seed in args.seeds:
        for steps in args.steps:
            for state in args.states if steps else ["restart"]:
                began = time.monotonic()
                found = trained(job(steps, seed, state, args), Settings().data_dir)
                about = {"steps": steps, "state": state, "seed": seed, "outer": args.outer, "batch": args.batch}
                about |= {"overlap": args.overlap, "replicas": args.replicas, "codec": args.codec, "inner": args.inner}
                seconds = round(time.monotonic() - began)
                print(json.dumps({**about, **found, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
