"""`python -m bench.golden`: the final weights of five small jobs, to compare before and after a refactoring.

The digests hold for one kind of machine (device, versions, processor), so they are not in the repository:
`--keep FILE` before the change and `--compare FILE` after it, on the same machine.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.stage import stage

DIGITS = {"dataset": "digits", "model": "mlp", "micro_batch": 16, "micro_batches_per_round": 4, "threads": 1}
LAST = {"rounds": 60, "checkpoint_every": 0, "evaluate_every": 0}
MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
LOCAL = {"kind": "local", "inner_steps": 5, "replicas": 4}
JOBS: dict[str, dict[str, Any]] = {
    "sync, SGD": {**DIGITS, "optimizer": MOMENTUM},
    "sync, AdamW": {**DIGITS, "optimizer": {"name": "AdamW", "lr": 1e-3}},
    "BatchNorm": {**DIGITS, "model": "shufflenet_v2_x0_5", "input": [3, 32, 32], "optimizer": MOMENTUM},
    "local": {"dataset": "digits", "model": "mlp", "micro_batch": 16, "threads": 1, "strategy": LOCAL},
    "int8 down": {**DIGITS, "optimizer": MOMENTUM, "codec": {"up": "float16", "down": "int8"}},
}
PATIENCE_S = 300.0


def digests() -> dict[str, str]:
    """Train each job with two workers; returns the sha256 of the final weights by job name."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder) / "home", 2, queue="golden") as plane:
        for name, spec in JOBS.items():
            job = plane.finish(plane.create({**LAST, **spec, "name": name}), PATIENCE_S, every=plane.tend)
            if job["status"] != "completed":
                raise RuntimeError(f"{name}: {job['status']}, {job['error'] or job['reason']}")
            found[name] = str(job["weights_sha256"])
            print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="Write the digests there.")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="Compare with those; exit code 1 if any differs.")
    given = parser.parse_args()
    found = digests()
    if given.keep:
        given.keep.write_text(json.dumps(found, indent=1))
    before = json.loads(given.compare.read_text()) if given.compare else found
    for name in sorted(found.keys() | before.keys()):
        if found.get(name) != before.get(name):
            print(f"{name}: was {before.get(name)}, is {found.get(name)}")
    return int(found != before)


if __name__ == "__main__":
    sys.exit(main())
