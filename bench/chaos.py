"""The release's counts of simulated schedules, damaged blobs and script mutants, in parts that can be resumed.

    python -m bench.chaos --minutes 30

Each part appends one line to chaos-results.jsonl; a part that passed on these very sources is not run again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "chaos-results.jsonl"
SOURCES = ("computeshare/**/*.py", "computeshare/lua/*.lua", "tests/simulation/*.py", "tests/integration/*.py")
COMMAND = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=0"]


@dataclass(frozen=True, slots=True)
class Part:
    """A test that is run `total` times in steps of `step`, each step from a seed of its own."""

    test: str
    total: int
    step: int
    counted_by: str = ""
    """The environment variable that sets how many the test runs; none for a test that is run once."""


PARTS: dict[str, Part] = {
    "script mutants": Part("tests/integration/test_script_mutants.py", 1, 1),
    "simulated schedules": Part("tests/simulation/test_schedules.py", 10_000, 500, "COMPUTESHARE_SCHEDULES"),
    "damaged blobs": Part("tests/integration/test_blob_fuzz.py", 200_000, 20_000, "COMPUTESHARE_BLOBS"),
}


def digest() -> str:
    """What results hold for: the sources and tests as they are now."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def results(sources: str, path: Path = RESULTS) -> dict[tuple[str, int], dict[str, Any]]:
    """The newest result on these sources of each part and first seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {(entry["part"], entry["first"]): entry for entry in entries if entry["sources"] == sources}


def due(done: dict[tuple[str, int], dict[str, Any]]) -> Iterator[tuple[str, Part, int]]:
    """What has not passed yet: a part, and the first seed of the step."""
    for name, part in PARTS.items():
        for first in range(0, part.total, part.step):
            if not done.get((name, first), {}).get("passed"):
                yield name, part, first


def run(part: Part, first: int) -> tuple[bool, str]:
    """Whether one step passed, and the end of what pytest said if it did not."""
    environment = {**os.environ, "COMPUTESHARE_SEED": str(first)}
    if part.counted_by:
        environment[part.counted_by] = str(part.step)
    ended = subprocess.run(
        [*COMMAND, part.test], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode == 0, "" if ended.returncode == 0 else ended.stdout[-4000:]


def table(sources: str) -> str:
    """One line per part: how much of it passed, failed and is left."""
    done = results(sources)
    lines = [f"{'part':<22}{'passed':>10}{'failed':>10}{'of':>10}{'minutes':>10}"]
    for name, part in PARTS.items():
        mine = [entry for (of, _), entry in done.items() if of == name]
        passed = part.step * sum(entry["passed"] for entry in mine)
        failed = part.step * sum(not entry["passed"] for entry in mine)
        minutes = sum(entry["seconds"] for entry in mine) / 60
        lines.append(f"{name:<22}{passed:>10,}{failed:>10,}{part.total:>10,}{minutes:>10.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="begin no further step after this long")
    parser.add_argument("--part", choices=PARTS, help="this one alone")
    options = parser.parse_args()
    sources, started = digest(), time.monotonic()
    for name, part, first in due(results(sources)):
        if time.monotonic() - started > 60 * options.minutes:
            break
        if options.part in (None, name):
            _step(sources, name, part, first)
    print(table(sources))
    if any(not entry["passed"] for entry in results(sources).values()):
        sys.exit(1)


def _step(sources: str, name: str, part: Part, first: int) -> None:
    began = time.monotonic()
    passed, told = run(part, first)
    entry = {"part": name, "first": first, "count": part.step, "passed": passed, "sources": sources}
    entry |= {"seconds": round(time.monotonic() - began, 1), "at": int(time.time()), "told": told}
    with RESULTS.open("a") as log:
        log.write(json.dumps(entry) + "\n")
    print(f"{name} from {first}: {'passed' if passed else 'FAILED'} in {entry['seconds']} s", flush=True)
    if not passed:
        print(told, flush=True)


if __name__ == "__main__":
    main()
