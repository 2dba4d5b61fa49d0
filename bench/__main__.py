"""Runs all measurements for docs/performance.md, part by part, and writes one Markdown document with plots.

    python -m bench [--only ddp-simplenet thin-simplenet-20mbit ...] [--quick] [--list]

Each part runs in a process of its own, with output in bench-results/PART.log and results in PART.json. A part that
fails is named at the end and does not stop the others. Results of earlier runs stay until their part is measured again.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Part, markdown, svg
from bench.support.results import ROOT
from bench.thin_cases import CASES

FOLDER = ROOT / "bench-results"
RESNET = ("--model", "resnet18", "--input", "3", "32", "32")
SKIPPED = "skipped: "
QUICK: dict[str, Sequence[str]] = {
    "simplenet": ("--limit", "8"),
    "gpt": ("--limit", "45", "--peers", "ddp"),
    "lenet5": ("--limit", "60", "--samples", "6400", "--score-every", "3200"),
    "resnet18": ("--limit", "120", "--samples", "256", "--score-every", "128", "--peers", "ddp", "powersgd4"),
}
"""Arguments by model for a quick check of a case over thin links, where a round of ResNet-18 takes DDP 36 s."""


@dataclass(frozen=True, slots=True)
class Command:
    """A module with its arguments; a quick check uses the arguments `quick` instead of `full`."""

    module: str
    arguments: Sequence[str] = ()
    full: Sequence[str] = ()
    quick: Sequence[str] = ()

    def line(self, quick: bool, results: Path) -> list[str]:
        """The command line."""
        chosen = self.quick if quick else self.full
        return [sys.executable, "-m", self.module, *self.arguments, *chosen, "--json", str(results)]


PARTS: dict[str, Command] = {
    "ddp-simplenet": Command("bench.ddp", ("--model", "simplenet"), (), ("--rounds", "60", "--pairs", "1")),
    "ddp-lenet5": Command("bench.ddp", ("--model", "lenet5"), (), ("--rounds", "60", "--pairs", "1")),
    "ddp-resnet18": Command("bench.ddp", RESNET, ("--rounds", "60"), ("--rounds", "4", "--pairs", "1")),
    "single-resnet18": Command("bench.single", (), (), ("--seconds", "10", "--inner-steps", "2", "--pairs", "1")),
    "traffic": Command("bench.traffic", (), (), ("--samples", "3200")),
    **{
        f"thin-{case}": Command("bench.thin", ("--case", case), (), ("--runs", "1", *QUICK[case.split("-")[0]]))
        for case in CASES
    },
    "scaling": Command("bench.scaling", (), (), ("--seconds", "1", "--times", "1", "--workers", "1", "4", "64")),
    "scaling-resnet18": Command(
        "bench.scaling",
        (*RESNET, "--micro-batches", "16"),
        ("--workers", "2", "4", "8", "16"),
        ("--workers", "2", "--times", "1"),
    ),
    "pages": Command(
        "bench.pages", (), (), ("--minutes", "0.2", "--versions", "2000", "--jobs", "200", "--seconds", "5")
    ),
    "memory-lenet5": Command("bench.memory", ("--model", "lenet5"), ("--rounds", "500"), ("--rounds", "50")),
    "memory-resnet18": Command("bench.memory", RESNET, ("--rounds", "10"), ("--rounds", "2")),
}


def run(name: str, quick: bool, folder: Path = FOLDER, parts: Mapping[str, Command] = PARTS) -> str:
    """Measure one part; returns `done ...`, `skipped: ...` or `FAILED ...`."""
    results, log = folder / f"{name}.json", folder / f"{name}.log"
    folder.mkdir(exist_ok=True)
    results.unlink(missing_ok=True)
    line, began = parts[name].line(quick, results), time.monotonic()
    with log.open("w") as words, subprocess.Popen(line, cwd=ROOT, stdout=words, stderr=words) as process:
        try:
            process.wait()
        except BaseException:  # it has links and processes to remove
            process.terminate()
            process.wait()
            raise
    said = log.read_text().strip().splitlines()
    if process.returncode == 0:
        return f"done in {time.monotonic() - began:.0f} s"
    if said and said[-1].startswith(SKIPPED):
        return said[-1]
    return f"FAILED with {process.returncode}: {said[-1] if said else ''} ({log}); {shlex.join(line[1:])}"


def write(folder: Path = FOLDER, parts: Mapping[str, Command] = PARTS) -> Path:
    """Write all stored results as one Markdown document, with the plots beside it; returns its path."""
    sections = ["# What was measured\n"]
    for name in parts:
        if (found := folder / f"{name}.json").exists():
            part = Part.load(found)
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.stat().st_mtime))
            sections.append(f"## {name}\n\nAt {when} UTC.\n\n{markdown(part)}")
            for plot in part.plots:
                (folder / f"{plot.name}.svg").write_text(svg(plot))
    document = folder / "results.md"
    document.write_text("\n".join(sections))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="a few rounds of each: whether it works, not how fast")
    parser.add_argument("--list", action="store_true", help="name the parts and the commands they are")
    options = parser.parse_args()
    chosen = options.only or PARTS
    if options.list:
        for name in chosen:
            line = PARTS[name].line(options.quick, FOLDER / f"{name}.json")
            print(f"{name:<28} python {shlex.join(line[1:])}")
        return
    end_cleanly_when_asked()
    failed = []
    for name in chosen:
        print(f"{name:<28} ", end="", flush=True)
        outcome = run(name, options.quick)
        print(outcome, flush=True)
        failed += [name] if outcome.startswith("FAILED") else []
    print(f"the table: {write()}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
