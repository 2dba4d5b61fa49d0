"""Measures strategy `pipeline`: with a stage's worker killed every minute, and over thin links beside `local`.

    python -m bench.pipeline --faults [--rounds 2000]
    python -m bench.pipeline --thin [--rate 20] [--limit 120]

`--faults` trains a small GPT on two workers of three, kills the worker of the last stage by SIGKILL every `--every`
seconds, and prints the seconds from each kill to the next version, the samples missing from the ledger, and whether the
weights are those of an undisturbed job. `--thin` prints tokens per second and megabytes of a GPT on two workers, each
behind a link of its own (Linux, root): `pipeline` with each codec of activations, and `local`, whose workers hold the
whole model.
"""

import argparse
import json
import os
import signal
import statistics
import time
from typing import Any

from bench import ours
from bench.ending import end_cleanly_when_asked
from bench.links import Shape, links
from bench.report import Cell, Part, Table, markdown
from bench.wait import wait_until
from computeshare.settings import Settings
from computeshare.types import ENDED

WORKERS, BLOCK = 2, 64
GPT: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": BLOCK}
BASE: dict[str, Any] = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": GPT, "threads": 1}
BASE |= {"checkpoint_every": 0, "evaluate_every": 0, "workers": {"min": WORKERS, "max": WORKERS}}
ADAMW = {"name": "AdamW", "lr": 1e-3}
PIPELINE: dict[str, Any] = {"kind": "pipeline", "stages": 2}


def piped(**strategy: Any) -> dict[str, Any]:
    """A job whose rounds are one micro-batch of 32 samples in 4 pieces."""
    fields = {"micro_batch": 32, "accumulate": 4, "micro_batches_per_round": 1, "optimizer": ADAMW}
    return BASE | fields | {"strategy": PIPELINE | strategy}


def local() -> dict[str, Any]:
    """The same samples per step and worker, an update every 50 steps."""
    strategy = {"kind": "local", "inner_steps": 50, "replicas": WORKERS, "inner_optimizer": ADAMW}
    return BASE | {"micro_batch": 32, "strategy": strategy, "codec": {"up": "int8", "down": "int8"}}


def thin(options: argparse.Namespace) -> Part:
    """Rates over links. Raises NoLinks."""
    runs = {f"pipeline, {codec}": piped(activations=codec) for codec in options.codecs}
    runs["local, 50 steps"] = local()
    rows: list[list[Cell]] = []
    with (
        links(WORKERS, Shape(options.rate, options.rtt)) as own,
        ours.plane(WORKERS, Settings().data_dir, own) as plane,
    ):
        for name, document in runs.items():
            course = ours.train(plane, document | {"rounds": 1_000_000}, options.limit, scored=False).course
            up, down = (sum(pair) / len(pair) / 1e6 for pair in zip(course.bytes_per_round, strict=True))
            per_sample = course.samples_per_s / max(course.rounds_per_s, 1e-9)
            rows.append([name, BLOCK * course.samples_per_s, 1000 * up / per_sample, 1000 * down / per_sample])
            print(json.dumps({"run": name, "tokens_per_s": rows[-1][1]}), flush=True)
    title = f"GPT of 4 layers, {WORKERS} workers, {options.rate:g} Mbit/s each way, {options.rtt:g} ms of round trip"
    return Part([Table(title, ("run", "tokens/s", "kB up a sample", "kB down a sample"), rows)])


def faults(options: argparse.Namespace) -> Part:
    """What the death of a stage's worker costs."""
    with ours.plane(WORKERS + 1, Settings().data_dir) as plane:
        calm = plane.client.create({"queue": ours.QUEUE, **piped(), "rounds": options.rounds})
        expected = ours.ended(plane.client, calm["id"], None)["weights_sha256"]
        created = plane.client.create({"queue": ours.QUEUE, **piped(), "rounds": options.rounds})
        recovery = disturbed(plane, created["id"], options.every)
        job = ours.ended(plane.client, created["id"], None)
        missing = sum(epoch["samples"] - epoch["counted"] for epoch in plane.client.ledger(job["id"]))
    same = job["weights_sha256"] == expected
    middle, worst = (f(recovery) if recovery else None for f in (statistics.median, max))
    row: list[Cell] = [len(recovery), middle, worst, missing, "yes" if same else "no"]
    columns = ("kills", "seconds to the next version, median", "worst", "samples missing", "same weights")
    return Part([Table(f"A stage's worker killed every {options.every:g} s", columns, [row])])


def disturbed(plane: ours.Plane, job_id: str, every_s: float) -> list[float]:
    """Kill the worker with the last stage now and then until the job ends; the seconds to the version after each."""
    recovery: list[float] = []
    while True:
        time.sleep(every_s)
        job, stages = plane.client.show(job_id), plane.client.stages(job_id)
        if job["status"] in ENDED or not stages:
            return recovery
        pids = {one["id"]: one["pid"] for one in plane.client.fleet()}
        os.kill(pids[stages[-1]["worker"]], signal.SIGKILL)
        killed, version = time.perf_counter(), plane.client.show(job_id)["version"]

        def goes_on(seen: int = version) -> bool:
            now = plane.client.show(job_id)
            return now["status"] in ENDED or now["version"] > seen + 1

        wait_until(goes_on, "the next version", 120)
        recovery.append(time.perf_counter() - killed)
        print(json.dumps({"recovered_s": round(recovery[-1], 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--rounds", type=int, default=2000, help="of the job with faults")
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--rate", type=float, default=20, help="Mbit/s of a link")
    parser.add_argument("--rtt", type=float, default=20, help="milliseconds of added round trip")
    parser.add_argument("--codecs", nargs="+", default=["bfloat16"], help="of activations")
    parser.add_argument("--limit", type=float, default=120, help="seconds of each run over links")
    options = parser.parse_args()
    end_cleanly_when_asked()
    for wanted, measure in ((options.faults, faults), (options.thin, thin)):
        if wanted:
            print(markdown(measure(options)), flush=True)


if __name__ == "__main__":
    main()
