"""Measures bytes per round, up and down, and accuracy after equal samples, for every codec.

    python -m bench.traffic --model lenet5 --samples 120000

Two workers run behind unlimited links, whose counters include all traffic; without root only the control plane's count
of blobs remains.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.links import Links, Shape, links, missing
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from computeshare.codecs.registry import CODECS
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings

WORKERS = 2
SCORED, LAST = 15, 5
"""Number of scored versions, and number of the last of these whose accuracies are averaged, to reduce noise."""


@contextmanager
def links_if_possible() -> Iterator[Links | None]:
    """Links to count bytes on; prints why and yields None if links cannot be made."""
    if why := missing():
        print(f"bytes of blobs alone are counted: {why}", file=sys.stderr)
        yield None
        return
    with links(WORKERS, Shape()) as made:
        yield made


def measure(plane: ours.Plane, document: dict[str, Any], up: str, down: str) -> list[Cell]:
    """Train with a codec; returns its row of the table."""
    try:
        trained = ours.train(plane, {**document, "codec": {"up": up, "down": down}})
    except (ComputeShareError, RuntimeError) as error:  # the other codecs are still of interest
        return [up, down, f"failed: {error}", *[None] * 5]
    course, job = trained.course, trained.job
    blobs = [job["bytes_up"] / job["version"] / 1000, job["bytes_down"] / job["version"] / 1000]
    wire = [moved / 1000 if plane.links else None for moved in course.bytes_per_round]
    accuracy = statistics.mean(list(course.accuracy.values())[-LAST:])
    return [up, down, f"{100 * accuracy:.2f}", *blobs, *wire, course.rounds_per_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--samples", type=int, default=120_000)
    parser.add_argument("--up", nargs="+", default=list(CODECS))
    parser.add_argument("--down", nargs="+", default=["float32"])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    rounds = -(-options.samples // (32 * WORKERS))
    document = {
        "dataset": "mnist",
        "model": options.model,
        "micro_batches_per_round": WORKERS,
        "rounds": rounds,
        "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9},
        "threads": 1,
        "checkpoint_every": max(1, rounds // SCORED),
        "keep": {"every": 1},
        "evaluate_every": 0,
    }
    with links_if_possible() as over, ours.plane(WORKERS, Settings().data_dir, over) as plane:
        rows = []
        for up in options.up:
            for down in options.down:
                rows.append(measure(plane, document, up, down))
                print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["up", "down", f"accuracy after {options.samples:,} samples, %", "blobs up, kB a round"]
    columns += ["blobs down, kB a round", "frames up, kB a round", "frames down, kB a round", "rounds/s"]
    note = (
        f"Accuracy is the mean over the last {LAST} of {SCORED} scored versions. Bytes are those of both workers; "
        "frames are everything on their links, heartbeats and headers included."
    )
    part = Part([Table(f"Bytes by codec, {options.model}", columns, rows, note)])
    print(markdown(part))
    if options.json:
        part.save(options.json)


if __name__ == "__main__":
    main()
