"""Compares rounds per second with torch DistributedDataParallel, in turns, and measures the steps of a round.

    python -m bench.ddp --model simplenet --rounds 1000 --pairs 5

ComputeShare and DDP train the same model on the same micro-batches with two workers of one thread each. The first tenth
of the rounds is not timed. Figures drift from hour to hour on a shared machine: quote the ratio.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import peer_ddp
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Part, Table, markdown, median, paired
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings

WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="simplenet")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--input", type=int, nargs=3)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--ours", type=json.loads, default={}, help="further fields of our JobSpec, as JSON")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    document = {
        "name": f"bench: {options.model}",
        "dataset": options.dataset,
        "model": options.model,
        "input": options.input,
        "micro_batch": options.micro_batch,
        "micro_batches_per_round": WORKERS,
        "rounds": options.rounds,
        "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
        "codec": {"up": options.codec, "down": "float32"},
        "threads": 1,
        "checkpoint_every": 0,
        "evaluate_every": 0,
    }
    part = compare(document, options.ours, options.pairs, Settings().data_dir)
    print(markdown(part))
    if options.json:
        part.save(options.json)


def compare(document: dict[str, Any], changed: dict[str, Any], pairs: int, data_dir: Path) -> Part:
    """Train with ComputeShare and DDP in turn, `pairs` times; `changed` holds JobSpec fields for ComputeShare only."""
    spec = JobSpec.model_validate_json(json.dumps(document))
    done = []
    with ours.plane(WORKERS, data_dir) as plane:
        for _ in range(pairs):
            trained = ours.train(plane, document | changed)
            done.append((trained, peer_ddp.train(spec, data_dir, WORKERS)))
            both = trained.course.rounds_per_s, done[-1][1].rounds_per_s
            print("ComputeShare {:6.1f}   DDP {:6.1f} rounds/s".format(*both), file=sys.stderr, flush=True)
    rates = [(trained.course.rounds_per_s, peer.rounds_per_s) for trained, peer in done]
    ratios = [a / b for a, b in rates]
    note = f"Pairs: {pairs}; ratios from {min(ratios):.2f} to {max(ratios):.2f}."
    columns = ["median of", "ComputeShare", "DDP", "ratio"]
    steps = [trained.milliseconds for trained, _ in done]
    split = [[step, median([each[step] for each in steps if step in each])] for step in steps[-1]]
    tables = [
        Table(f"Good link, {spec.model}", columns, [paired("rounds/s", rates)], note),
        Table(f"Where a round's time goes, {spec.model}", ["step", "ms, median"], split),
    ]
    details = [{"ours": asdict(t.course)["points"][-1], "ddp": asdict(p)["points"][-1]} for t, p in done]
    return Part(tables, details={f"good link, {spec.model}": {"rates": rates, "last": details}})


if __name__ == "__main__":
    main()
