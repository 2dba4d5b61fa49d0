"""Runs the randomized tests of a release as often as it requires, in parts that can be resumed.

    python -m bench.chaos --minutes 60 --jobs 2

Each step of a part appends one line to chaos-results.jsonl. A step that passed is not run again until a source file
changes on which the part depends.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.results import ROOT, append, digest, load

RESULTS = ROOT / "chaos-results.jsonl"
COMMAND = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=0"]
ROUNDS = ("computeshare/protocol/lua/*.lua", "computeshare/protocol/*.py", "computeshare/types.py")
TRAINING = ("computeshare/**/*.py", "computeshare/protocol/lua/*.lua")
CONTROL = ("api/**/*.py", "migrations/**/*.py", "computeshare/queue/*.py", "computeshare/settings.py", *ROUNDS)
BROKER = (
    "tests/integration/conftest.py",
    "computeshare/up/embedded_broker.py",
    "computeshare/transport/connections.py",
)
SUITE = (
    *TRAINING,
    *CONTROL,
    *BROKER,
    "api/pages/**/*.*ml",
    "api/pages/static/*.*",
    "bench/**/*.py",
    "examples/**/*.py",
    "tests/conftest.py",
    "tests/support/*.py",
)
TIERS = ("e2e", "integration", "unit")
"""Folders of tests of which `make test` runs a sample."""


@dataclass(frozen=True, slots=True)
class Part:
    """A test with `total` cases in all, run in steps of `step` cases; each step has its own seed."""

    test: str
    """A test file, or a folder of test files."""
    total: int
    step: int
    sources: tuple[str, ...]
    """Patterns of the files on which the result depends, besides the test's own files."""
    counted_by: str = ""
    """The environment variable for the number of cases; empty for a test that is run once."""
    shows: str = "violations"
    """The failures that a passing test rules out."""

    @property
    def files(self) -> str:
        return self.test if self.test.endswith(".py") else f"{self.test}/**/*.py"

    def digest(self) -> str:
        """The digest of the part's current sources, for which a result holds."""
        return digest((*self.sources, self.files), f"{self.step} {self.counted_by}")


PARTS: dict[str, Part] = {
    **{f"all cases of {tier}": Part(f"tests/{tier}", 1, 1, SUITE, "", "failures") for tier in TIERS},
    "script mutants": Part(
        "tests/integration/protocol/test_script_mutants.py",
        1000,  # more than there are mutants
        1000,
        (*ROUNDS, *BROKER, "tests/integration/protocol/**/*.py", "tests/support/*.py"),
        "COMPUTESHARE_MUTANTS",
        "survivors",
    ),
    "simulated schedules": Part(
        "tests/simulation/test_schedules.py",
        10_000,
        500,
        (*ROUNDS, "computeshare/jobspec/sampling_plan.py", "tests/simulation/*.py"),
        "COMPUTESHARE_SCHEDULES",
    ),
    "damaged blobs": Part(
        "tests/integration/codecs/test_blob_fuzz.py",
        200_000,
        20_000,
        ("computeshare/codecs/*.py", "computeshare/tensors/layout.py"),
        "COMPUTESHARE_BLOBS",
        "crashes, bad accepts, growth over 64 MB",
    ),
    "outbox kill points": Part(
        "tests/integration/api/publication/test_outbox_kills.py",
        250,
        50,
        (*CONTROL, *BROKER, "computeshare/runtime/failpoints.py", "tests/support/outbox_trial.py"),
        "COMPUTESHARE_KILL_POINTS",
        "missing seats, duplicate seats",
    ),
    "append-only cuts": Part(
        "tests/integration/api/projection/test_append_only.py",
        300,
        50,
        (*TRAINING, *CONTROL, *BROKER),
        "COMPUTESHARE_CUTS",
        "mixed branches",
    ),
    "API fuzz": Part(
        "tests/integration/api/test_schema.py",
        50_000,
        5_000,
        (*CONTROL, *BROKER, "computeshare/jobspec/*.py"),
        "COMPUTESHARE_CALLS",
        "answers of 5xx",
    ),
    "kill schedules": Part(
        "tests/e2e/test_kill_schedules.py",
        300,
        25,
        (*TRAINING, *CONTROL, "bench/stage.py", "bench/faults.py"),
        "COMPUTESHARE_KILLS",
        "lost rounds, double counts, orphans",
    ),
}


def results(digests: dict[str, str], path: Path = RESULTS) -> dict[tuple[str, int], dict[str, Any]]:
    """The newest result for each (part, first seed) on sources with these digests."""
    return {(e["part"], e["first"]): e for e in load(path) if e["sources"] == digests.get(e["part"])}


def due(done: dict[tuple[str, int], dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """The steps that have not passed yet, as (part's name, first seed)."""
    for name, part in PARTS.items():
        for first in range(0, part.total, part.step):
            if not done.get((name, first), {}).get("passed"):
                yield name, first


def run(part: Part, first: int) -> tuple[bool, str]:
    """Run one step; returns whether it passed, and if not the end of pytest's output."""
    environment = {**os.environ, "COMPUTESHARE_SEED": str(first), "COMPUTESHARE_CASES": "all"}
    if part.counted_by:
        environment[part.counted_by] = str(part.step)
    ended = subprocess.run(
        [*COMMAND, part.test], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode == 0, "" if ended.returncode == 0 else (ended.stdout + ended.stderr)[-4000:]


def table(done: dict[tuple[str, int], dict[str, Any]]) -> str:
    """A line for each part: cases passed, failed and in all, minutes, and the result."""
    lines = [f"{'part':<22}{'passed':>10}{'failed':>10}{'of':>10}{'minutes':>10}  result"]
    for name, part in PARTS.items():
        mine = [entry for (of, _), entry in done.items() if of == name]
        passed = part.step * sum(entry["passed"] for entry in mine)
        failed = part.step * sum(not entry["passed"] for entry in mine)
        minutes = sum(entry["seconds"] for entry in mine) / 60
        verdict = "FAILED, see chaos-results.jsonl" if failed else f"0 {part.shows}" if passed else "not run"
        lines.append(f"{name:<22}{passed:>10,}{failed:>10,}{part.total:>10,}{minutes:>10.1f}  {verdict}")
    return "\n".join(lines)


class Runner:
    """Runs steps until the time is up, and stores each result."""

    def __init__(self, digests: dict[str, str], until: float) -> None:
        self._digests, self._until = digests, until
        self._writing = threading.Lock()

    def step(self, name: str, first: int) -> None:
        if time.monotonic() > self._until:
            return
        began = time.monotonic()
        passed, told = run(PARTS[name], first)
        entry = {"part": name, "first": first, "count": PARTS[name].step, "passed": passed}
        entry |= {"sources": self._digests[name], "seconds": round(time.monotonic() - began, 1), "told": told}
        with self._writing:
            append(RESULTS, entry)
            print(f"{name} from {first}: {'passed' if passed else 'FAILED'} in {entry['seconds']} s", flush=True)
            if not passed:
                print(told, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="begin no further step after this long")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time")
    parser.add_argument("--part", choices=PARTS, action="append", help="this one alone; may be given several times")
    options = parser.parse_args()
    digests = {name: part.digest() for name, part in PARTS.items()}
    runner = Runner(digests, time.monotonic() + 60 * options.minutes)
    steps = [(name, first) for name, first in due(results(digests)) if not options.part or name in options.part]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda step: runner.step(*step), steps))
    done = results(digests)
    print(table(done))
    if any(not entry["passed"] for entry in done.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
