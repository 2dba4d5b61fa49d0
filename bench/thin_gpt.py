"""A small GPT on two workers over thin links, beside a plain PyTorch loop on one machine: loss and time, equal tokens.

    python -m bench.thin_gpt [--runs 5] [--rate 5] [--samples 24000] [--rates 0.003 0.004] [--only NAME]

nanoGPT's setting for a CPU: tinyshakespeare, 12 windows of 64 characters a step. The loop trains once with each of
`--rates`, with one thread; the one with the lowest loss counts. Workers take 6 windows a step, so that each makes as
many steps as the loop: by `gossip`, which hides the link, and by `local`, with an overlap or waiting for the link.
Prints the loss on the test split in nats, and seconds of training. A job's time begins when its first worker joins.
Needs root, for the links.

The workers, the reducer and the broker share this machine's cores, which the loop has for itself. With `--half-cores` a
machine is half of one core: the loop shares a core with a second loop, which is not measured, and the workers share it
with each other; all else runs on the other cores.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.links import NoLinks, Shape, links
from bench.local_loss import SAMPLES, WARMUP, job_of_gpt, lasting
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown, median, spread
from bench.support.small_gpt import ADAMW, GPT
from bench.thin_cases import OVERLAP, WORKERS, codec, gossip, local, selected
from computeshare.runtime.processes import exit_with_parent
from computeshare.settings import Settings
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of

BATCH, OWN_BATCH, FINAL = 12, 6, 0.1
"""Windows of a step of the loop, and of a worker; the last rate, as a share of the first."""
GOALS = {"loss": 0.05, "time": 0.6}
"""How much the loss may be above the loop's, in nats, and the share of the loop's time."""


def kept(inner_steps: int, **changes: Any) -> dict[str, Any]:
    """JobSpec fields for strategy `local` with so many steps a round and an inner state that stays, by `int4`."""
    waiting = {"inner_state": "kept", "outer_lr": 0.8, "outer_momentum": 0.5}
    fields = local(inner_steps, 3e-3, codec("int4"), ADAMW, **waiting | changes)
    return {name: value for name, value in fields.items() if value is not None}


OURS = {
    "gossip of 50 steps, int8": gossip(50, OWN_BATCH, 3e-3),
    "gossip of 25 steps, int4": gossip(25, OWN_BATCH, 3e-3, "int4"),
    "local of 25 steps, int4, overlap of 10": kept(25, **OVERLAP),
    "local of 25 steps, int4": kept(25),
    "local of 50 steps, int4": kept(50),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training. `loss`: on the test split, in nats; `busy`: the least share of its time that a worker computed;
    `moved`: kB up and down a round, both workers.
    """

    loss: float
    seconds: float
    samples: int
    busy: float | None = None
    moved: tuple[float | None, float | None] = (None, None)


def plain(lr: float, seed: int, samples: int, data: Path) -> Run:
    """Train by a plain loop on one machine."""
    fields = {**GPT, "seed": seed, "micro_batch": BATCH, "micro_batches_per_round": 1, "optimizer": ADAMW}
    spec = lasting(fields, samples)
    task, plan, steps = task_of(spec), spec.plan, spec.rounds_total
    instance = task.instance(spec.seed, "train", data)
    module = instance.module.train()
    decayed = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **spec.optimizer.arguments | {"lr": lr})

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    began = time.monotonic()
    for number in range(steps):
        optimizer.zero_grad()
        task.loss(module, instance.split.batch(plan.indices(number))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.clip_norm)
        optimizer.step()
        scheduler.step()
    seconds = time.monotonic() - began
    judge = task.instance(spec.seed, "test", data)
    return Run(score(judge, weights_of(module, instance.layout)).loss, seconds, steps * BATCH)


CORE = 0
"""The core that two machines share with `--half-cores`."""


def _neighbour(samples: int, data: Path, begun: Any) -> None:
    """In a process of its own: compute what the loop computes, on the same core, until it is killed."""
    exit_with_parent()
    torch.set_num_threads(1)
    begun.set()
    while True:
        plain(1e-3, 0, samples, data)


@contextlib.contextmanager
def _half_a_core(samples: int, data: Path) -> Iterator[None]:
    """Share a core with a second loop until the end of the block."""
    before, context = os.sched_getaffinity(0), multiprocessing.get_context("spawn")
    os.sched_setaffinity(0, {CORE})
    begun = context.Event()
    neighbour = context.Process(target=_neighbour, args=(samples, data, begun), daemon=True)
    neighbour.start()
    try:
        if not begun.wait(60):
            raise RuntimeError("the second loop did not begin within 60 s")
        yield
    finally:
        neighbour.kill()
        neighbour.join()
        os.sched_setaffinity(0, before)


def _share_a_core(plane: ours.Plane) -> None:
    """Keep the workers to one core, and all that runs besides to the others."""
    others = os.sched_getaffinity(0) - {CORE}
    for role, pids in plane.pids().items():
        for thread in (thread.id for pid in pids for thread in psutil.Process(pid).threads()):
            os.sched_setaffinity(thread, {CORE} if role == "worker" else others)


def compare(options: argparse.Namespace, data: Path) -> Part:
    """Train with the loop and with each of `ours` in turn, with one seed after another. Raises NoLinks."""
    torch.set_num_threads(1)
    loops = {f"one machine, plain loop, rate {lr:g}": lr for lr in options.rates}
    jobs = selected(options.ours, options.only)
    found: dict[str, list[Run]] = {name: [] for name in [*loops, *jobs]}
    with links(WORKERS, Shape(options.rate)) as over, ours.plane(WORKERS, data, over) as plane:
        if options.half_cores:
            _share_a_core(plane)
        for seed in range(options.runs):
            for name, lr in loops.items():
                with _half_a_core(options.samples, data) if options.half_cores else contextlib.nullcontext():
                    found[name].append(_told(name, seed, plain(lr, seed, options.samples, data)))
            for name, fields in jobs.items():
                found[name].append(_told(name, seed, _train(plane, {**fields, "seed": seed}, options.samples)))
    title = f"GPT of 0.8 M parameters, {options.samples:,} samples, two workers at {options.rate:g} Mbit/s"
    return tell(title, found, [*loops])


def _train(plane: ours.Plane, fields: dict[str, Any], samples: int) -> Run:
    steps = fields["strategy"].get("inner_steps") or fields["strategy"]["every"]
    trained = ours.train(plane, job_of_gpt(fields, WORKERS, steps, OWN_BATCH, samples), scored=False)
    loss = plane.client.metrics(trained.job["id"])["test_loss"][-1]["value"]
    last, (up, down) = trained.course.points[-1], trained.course.bytes_per_round
    return Run(loss, last.seconds, last.samples, min(trained.busy.values()), (up / 1000, down / 1000))


def _told(name: str, seed: int, run: Run) -> Run:
    print(json.dumps({"run": name, "seed": seed, **asdict(run)}), file=sys.stderr, flush=True)
    return run


def tell(title: str, found: Mapping[str, Sequence[Run]], loops: Sequence[str]) -> Part:
    """The report: medians, and how each run compares with that of the same seed of the loop with the lowest loss."""
    least = found[min(loops, key=lambda name: median([run.loss for run in found[name]]) or math.inf)]
    rows: list[list[Cell]] = []
    for name, runs in found.items():
        pairs = [*zip(runs, least, strict=True)]
        above, share = [a.loss - b.loss for a, b in pairs], [a.seconds / b.seconds for a, b in pairs]
        moved = [median(each) for each in zip(*(run.moved for run in runs), strict=True)]
        losses: list[Cell] = [median([run.loss for run in runs]), median(above), spread(above)]
        times: list[Cell] = [median([run.seconds for run in runs]), median(share), spread(share)]
        rows.append([name, runs[0].samples, *losses, *times, median([run.busy for run in runs]), *moved])
    columns = ["medians", "samples", "test loss, nats", "above the loop", "range", "seconds", "of the loop's time"]
    columns += ["range", "computing, share of it", "kB up a round, both workers", "kB down"]
    goal = f"at most {GOALS['loss']} nats above the loop in at most {GOALS['time']} of its time"
    details = {name: [asdict(run) for run in runs] for name, runs in found.items()}
    note = f"Goal: {goal}. Runs: {len(least)}, each with a seed of its own."
    return Part([Table(title, columns, rows, note)], [], details)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5, help="Mbit/s each way")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 4e-3], help="of the loop's optimizer")
    parser.add_argument("--runs", type=int, default=1, help="of each, in turn, each with a seed of its own")
    parser.add_argument("--ours", type=json.loads, default=OURS, help="fields of JobSpecs by name, as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these configurations, these alone")
    parser.add_argument("--half-cores", action="store_true", help="a machine is half of a core")
    options = parser.parse_args()
    end_cleanly_when_asked()
    print(markdown(compare(options, Settings().data_dir)))


if __name__ == "__main__":
    try:
        main()
    except NoLinks as why:
        sys.exit(f"skipped: {why}")
