"""Measures strategy `pipeline`: with stages' workers killed, over thin links beside `local`, and beside all strategies.

    python -m bench.pipeline --faults [--minutes 10] [--every 60]
    python -m bench.pipeline --thin [--minutes 3] [--rate 20] [--steps 50]
    python -m bench.pipeline --table [--samples 25600] [--rate 20] [--only sync local]

All train a small GPT. `--faults`, on two workers of three: a calm job for so many minutes, then the same versions
again, while the worker of one stage after the other is killed by SIGKILL every `--every` seconds. Prints the ratio of
samples per second (goal: 85 %), the seconds from each kill to the next version, the samples missing from the ledger,
and whether the weights are the same. `--thin`, on two workers, each behind a link of its own (Linux, root): tokens per
second, bytes, and the share of the link that is used, of `pipeline` with each codec of activations and of `local`,
whose workers hold the whole model. `--table`, over the same links: the same of each strategy, and its loss on the test
split, after equal samples. The last line of each is a summary.
"""

import argparse
import contextlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.links import Shape, links
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, cell, markdown
from bench.support.wait import wait_until
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks.text import texts
from computeshare.types import ENDED

WORKERS, BLOCK, STAGES = 2, 64, 2
GOAL = 0.85
"""Of the calm job's samples per second."""
GPT: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": BLOCK}
BASE: dict[str, Any] = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": GPT, "threads": 1}
BASE |= {"checkpoint_every": 0, "evaluate_every": 0, "workers": {"min": WORKERS, "max": WORKERS}, "micro_batch": 32}
ADAMW = {"name": "AdamW", "lr": 1e-3}
EIGHT_BITS = {"up": "int8", "down": "int8"}
FAULTS_MINUTES, THIN_MINUTES = 10.0, 3.0
ENDLESS = {"rounds": 1_000_000}
USED, LOSS = ("link used up, %", "down, %", "computing, %"), "test loss, nats per token"


def data_dir() -> Path:
    """The folder with the text (`COMPUTESHARE_DATA`), which is downloaded if it is missing. Raises DatasetError."""
    folder = Settings().data_dir
    texts.prepare(str(BASE["dataset"]), folder)
    return folder


def piped(activations: str = "float32", **changes: Any) -> dict[str, Any]:
    """A job whose rounds are one micro-batch of 64 samples in 8 pieces."""
    strategy = {"kind": "pipeline", "stages": STAGES, "activations": activations}
    fields = {"micro_batch": 64, "accumulate": 8, "micro_batches_per_round": 1, "optimizer": ADAMW}
    return BASE | fields | {"strategy": strategy} | changes


def local(steps: int) -> dict[str, Any]:
    """A job whose workers send an update every so many steps."""
    strategy = {"kind": "local", "inner_steps": steps, "replicas": WORKERS, "inner_optimizer": ADAMW}
    return BASE | {"strategy": strategy, "codec": EIGHT_BITS}


def strategies() -> dict[str, dict[str, Any]]:
    """A job of each strategy, with 64 samples for each step of an optimizer that all workers share."""
    gossip = {"kind": "gossip", "every": 20, "buffer": 2 * WORKERS, "inner_optimizer": ADAMW}
    shared = {"optimizer": ADAMW, "codec": EIGHT_BITS}
    return {
        "sync": BASE | shared | {"micro_batches_per_round": WORKERS},
        "async": BASE | shared | {"strategy": {"kind": "async", "buffer": WORKERS}},
        "local": local(20),
        "gossip": BASE | {"strategy": gossip, "codec": {"up": "int8", "down": "float32"}},
        "pipeline": piped("bfloat16", codec={"up": "int8", "down": "bfloat16"}),
    }


def faults(options: argparse.Namespace) -> Part:
    """The cost of the deaths of stages' workers: of three seats, one stands by, as there are too few for two chains."""
    document = piped(micro_batch=32, micro_batches_per_round=2, workers={"min": WORKERS, "max": WORKERS + 1})
    with ours.plane(WORKERS + 1, data_dir()) as plane:
        calm = ours.train(plane, document | ENDLESS, 60 * (options.minutes or FAULTS_MINUTES), scored=False)
        print(json.dumps({"calm": calm.course.samples_per_s, "versions": calm.job["version"]}), flush=True)
        killer = Killer(plane, options.every)
        again = {"rounds": calm.job["version"]}
        shaken = ours.train(plane, document | again, scored=False, meanwhile=killer.disturb)
        missing = sum(epoch["samples"] - epoch["counted"] for epoch in plane.client.ledger(shaken.job["id"]))
    ratio = shaken.course.samples_per_s / calm.course.samples_per_s
    same = shaken.job["weights_sha256"] == calm.job["weights_sha256"]
    middle, worst = (f(killer.recovery) if killer.recovery else None for f in (statistics.median, max))
    rates = calm.course.samples_per_s, shaken.course.samples_per_s
    row: list[Cell] = [*rates, 100 * ratio, len(killer.recovery), middle, worst, missing, "yes" if same else "no"]
    columns = ("samples/s, calm", "with kills", "ratio, %", "kills", "seconds to the next version, median", "worst",
               "samples missing", "same weights")  # fmt: skip
    told = f"{cell(100 * ratio)} % of the calm job's samples per second (goal: {100 * GOAL:g} %)"
    same_too = f"{missing} samples missing, {'the same' if same else 'OTHER'} weights"
    summary = f"A stage's worker killed every {options.every:g} s, {len(killer.recovery)} times: {told}, {same_too}"
    return Part([Table("Stages' workers killed", columns, [row], summary)])


@dataclass
class Killer:
    """Kills workers of a job's stages, one stage after the other; `recovery` has the seconds to the version after."""

    plane: ours.Plane
    every_s: float

    def __post_init__(self) -> None:
        self.recovery: list[float] = []

    def disturb(self, job_id: str) -> None:
        """Kill now and then, until the job ends, from its first version on."""
        client = self.plane.client
        wait_until(lambda: client.show(job_id)["version"], "the first version", ours.START_S)
        due = time.monotonic()
        for number in range(1_000_000):
            due += self.every_s
            time.sleep(max(0.0, due - time.monotonic()))
            stages = client.stages(job_id)
            holder = next((one for one in stages if one["first"] <= number % STAGES < one["stop"]), None)
            if client.show(job_id)["status"] in ENDED:
                return
            if holder and self._kill(holder["worker"]):
                self._watch(job_id)

    def _kill(self, worker: str) -> bool:
        """Kill a worker and its seat; False: it is not there."""
        pid = next((one["pid"] for one in self.plane.client.fleet() if one["id"] == worker), None)
        killed = False
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid) if pid else None
            for process in [parent, *parent.children()] if parent else []:
                process.kill()
                killed = True
        return killed

    def _watch(self, job_id: str) -> None:
        """Wait for a version that was not under way at the kill."""
        began, version = time.monotonic(), self.plane.client.show(job_id)["version"]

        def goes_on() -> bool:
            now = self.plane.client.show(job_id)
            return now["status"] in ENDED or now["version"] > version + 1

        wait_until(goes_on, "the next version", 120, 0.2)
        self.recovery.append(time.monotonic() - began)
        print(json.dumps({"recovered_s": round(self.recovery[-1], 2)}), flush=True)


def used(found: ours.Trained, plane: ours.Plane, rate_mbit: float) -> list[Cell]:
    """Percent of a worker's link that is used up and down, and of its time that it computes."""
    course = found.course
    way_s = (8e-6 * moved * course.rounds_per_s / WORKERS for moved in course.bytes_per_round)
    stages = plane.client.stages(found.job["id"])
    busy = [one["busy"] for one in stages if one["busy"] is not None] or [*found.busy.values()]
    return [*(100 * mbit / rate_mbit for mbit in way_s), 100 * statistics.fmean(busy)]


def thin(options: argparse.Namespace) -> Part:
    """Rates over links. Raises NoLinks."""
    lossy = {"up": "int8", "down": "bfloat16"}
    runs = {f"pipeline, activations {codec}": piped(codec, codec=lossy) for codec in options.codecs}
    runs[f"local, {options.steps} steps"] = local(options.steps)
    rows: list[list[Cell]] = []
    with _planes_behind_links(options) as plane:
        for name, document in runs.items():
            found = ours.train(plane, document | ENDLESS, 60 * (options.minutes or THIN_MINUTES), scored=False)
            course = found.course
            tokens = BLOCK * course.samples_per_s
            each = (moved * course.rounds_per_s / tokens / WORKERS for moved in course.bytes_per_round)
            rows.append([name, tokens, *each, *used(found, plane, options.rate)])
            print(json.dumps(dict(zip(("run", "tokens_per_s"), rows[-1][:2], strict=True))), flush=True)
    columns = ("run", "tokens/s", "bytes up a token and worker", "down", *USED)
    rates = ", ".join(f"{row[0]}: {cell(row[1])} tokens/s, {cell(max(row[4:6]))} % of the link" for row in rows)  # type: ignore[type-var]
    return Part([Table(_over(options), columns, rows, f"Over {options.rate:g} Mbit/s: {rates}")])


def table(options: argparse.Namespace) -> Part:
    """All strategies, one after the other, over the same links. Raises NoLinks."""
    rows: list[list[Cell]] = []
    with _planes_behind_links(options) as plane:
        for name, document in strategies().items():
            if options.only and name not in options.only:
                continue
            spec = JobSpec.model_validate(document | {"rounds": 1})
            rounds = max(2, options.samples // (spec.micro_batch * spec.micro_batches_per_round))
            found = ours.train(plane, document | {"rounds": rounds}, scored=False)
            last, losses = found.course.points[-1], plane.client.metrics(found.job["id"])["test_loss"]
            each = (moved / WORKERS / 1e6 for moved in (last.bytes_up, last.bytes_down))
            tokens_per_s = BLOCK * found.course.samples_per_s
            share = used(found, plane, options.rate)
            rows.append([name, last.samples, tokens_per_s, *each, *share, losses[-1]["value"]])
            print(json.dumps({"run": name, "tokens_per_s": tokens_per_s, "loss": rows[-1][-1]}), flush=True)
    columns = ("strategy", "samples", "tokens/s", "MB up a worker", "MB down a worker", *USED, LOSS)
    fastest = max(rows, key=lambda row: row[2])  # type: ignore[arg-type, return-value]
    told = ", ".join(f"{row[0]} {cell(row[2])} tokens/s to a loss of {cell(row[-1])}" for row in rows)
    return Part([Table(_over(options), columns, rows, f"Fastest: {fastest[0]}. {told}")])


@contextlib.contextmanager
def _planes_behind_links(options: argparse.Namespace) -> Any:
    shape = Shape(options.rate, options.rtt)
    with links(WORKERS, shape) as own, ours.plane(WORKERS, data_dir(), own) as plane:
        yield plane


def _over(options: argparse.Namespace) -> str:
    link = f"{options.rate:g} Mbit/s each way, {options.rtt:g} ms of round trip"
    return f"GPT of {GPT['n_layer']} layers, {WORKERS} workers, {link}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--thin", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--minutes", type=float, help="of a run; default: 10 of the calm job, 3 of each over links")
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--rate", type=float, default=20, help="Mbit/s of a link")
    parser.add_argument("--rtt", type=float, default=20, help="milliseconds of added round trip")
    parser.add_argument("--codecs", nargs="+", default=["bfloat16"], help="of activations, with --thin")
    parser.add_argument("--steps", type=int, default=50, help="between two updates of local, with --thin")
    parser.add_argument("--samples", type=int, default=25_600, help="of each strategy, with --table")
    parser.add_argument("--only", nargs="+", choices=strategies(), help="strategies of --table")
    options = parser.parse_args()
    end_cleanly_when_asked()
    for wanted, measure in ((options.faults, faults), (options.thin, thin), (options.table, table)):
        if wanted:
            print(markdown(measure(options)), flush=True)


if __name__ == "__main__":
    main()
