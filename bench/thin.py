"""Compares ComputeShare with torch DistributedDataParallel over thin links: rates, bytes, and accuracy over time.

    python -m bench.thin --case simplenet-20mbit --pairs 5
    python -m bench.thin --case resnet18-20mbit --ours '{"codec": {"up": "float16"}}' --limit 120

ComputeShare and DDP take turns on the same model, data and links, with two workers of one thread each. DDP gets one
micro-batch for each rank and round; the case's `ours`, or `--ours`, holds JobSpec fields that differ for ComputeShare.
Each measurement ends after `--limit` seconds, so that only a few of the slow rounds are measured. A case with an
accuracy compares accuracy after equal samples, and the time to it; where DDP would take hours over the link, its
accuracy comes from a run without a link. The time never includes scoring.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import ours, peer_ddp
from bench.course import Course, Point
from bench.ending import end_cleanly_when_asked
from bench.links import Links, NoLinks, Shape, links
from bench.report import Cell, Part, Plot, Table, markdown, median, merged, paired
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings

WORKERS = 2
BASE: dict[str, Any] = {
    "dataset": "mnist",
    "micro_batch": 32,
    "micro_batches_per_round": WORKERS,
    "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9},
    "threads": 1,
    "checkpoint_every": 0,
    "keep": {"every": 1},
    "evaluate_every": 0,
}
RESNET: dict[str, Any] = {"model": "resnet18", "input": [3, 32, 32]}
DIFFERENCES: dict[str, Any] = {"codec": {"up": "int8", "down": "int8"}}
SPARSE: dict[str, Any] = {"codec": {"up": "topk", "down": "topk"}}


def local(inner_steps: int, lr: float, delay: int = 0) -> dict[str, Any]:
    """JobSpec fields for plain local SGD with `inner_steps` steps per round."""
    inner = {"name": "SGD", "lr": lr, "momentum": 0.9}
    strategy = {"kind": "local", "inner_steps": inner_steps, "replicas": WORKERS, "inner_optimizer": inner}
    return {
        **DIFFERENCES,
        "strategy": {**strategy, "outer_lr": 1, "outer_momentum": 0, "delay": delay},
        "micro_batches_per_round": None,  # follows from the strategy
        "optimizer": None,
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `peer` holds JobSpec fields that override BASE; `ours` overrides both for ComputeShare, and None
    removes a field.

    `samples`: samples that both train on; 0: as many as the time allows. `score_every`: samples between scores.
    `accuracy`: target (a fraction) for the comparison of times. `unshaped`: DDP's accuracy comes from a separate run
    without a link, and its run over the link measures only its rate. `peer_limit_s`: time limit of DDP's run over the
    link; 0: `limit_s`.
    """

    shape: Shape
    peer: Mapping[str, Any]
    ours: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    samples: int = 0
    score_every: int = 0
    accuracy: float | None = None
    unshaped: bool = False
    peer_limit_s: float = 0.0


CASES: dict[str, Case] = {
    "simplenet-20mbit": Case(Shape(20), {"model": "simplenet"}, DIFFERENCES, limit_s=20),
    "simplenet-20mbit-topk": Case(Shape(20), {"model": "simplenet"}, SPARSE, limit_s=20),
    "simplenet-20mbit-20ms": Case(Shape(20, 20), {"model": "simplenet"}, DIFFERENCES, limit_s=20),
    "simplenet-5mbit": Case(Shape(5), {"model": "simplenet"}, DIFFERENCES, limit_s=30),
    "resnet18-20mbit": Case(Shape(20), RESNET, local(50, 0.02), limit_s=180),
    "resnet18-20mbit-20ms": Case(Shape(20, 20), RESNET, local(50, 0.02), limit_s=180),
    "resnet18-20mbit-accuracy": Case(
        Shape(20), RESNET, local(50, 0.02), 900, 57_600, score_every=6400, unshaped=True, peer_limit_s=180
    ),
    "resnet18-5mbit-auto": Case(Shape(5), RESNET, {**local(20, 0.02), "codec": "auto"}, 600, peer_limit_s=180),
    "resnet18-100mbit-delay": Case(Shape(100), RESNET, {**DIFFERENCES, "strategy": {"delay": 1}}, limit_s=60),
    "resnet18-20mbit-delay": Case(Shape(20), RESNET, local(50, 0.02, delay=1), limit_s=180),
    "resnet18-20mbit-40ms-delay": Case(Shape(20, 40), RESNET, local(50, 0.02, delay=1), limit_s=180),
    "lenet5-to-98": Case(
        Shape(20), {"model": "lenet5"}, local(50, 0.03), 900, 240_000, score_every=6400, accuracy=0.98
    ),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The results of one turn of ComputeShare and of DDP."""

    ours: ours.Trained
    peer: Course


def specs(case: Case) -> tuple[dict[str, Any], JobSpec]:
    """The document of ComputeShare's job, and DDP's JobSpec."""
    peer = JobSpec.model_validate_json(json.dumps({**BASE, **case.peer, "rounds": 1}))
    document = {name: value for name, value in {**BASE, **case.peer, **case.ours}.items() if value is not None}
    plan = JobSpec.model_validate_json(json.dumps({**document, "rounds": 1})).plan
    document.setdefault("rounds", _rounds_of(plan, case.samples))
    if case.score_every:
        document["checkpoint_every"] = max(1, case.score_every // (plan.micro_batch * plan.micro_batches_per_round))
    return document, peer.model_copy(update={"rounds": _rounds_of(peer.plan, case.samples)})


def _rounds_of(plan: Plan, samples: int) -> int:
    """The number of rounds for this many samples (0: a million rounds); an epoch's last round may be shorter."""
    epochs, rest = divmod(samples, plan.samples)
    return epochs * plan.rounds_per_epoch - (-rest // (plan.micro_batch * plan.micro_batches_per_round)) or 1_000_000


def train_peer(case: Case, data_dir: Path, over: Links | None, scored: bool) -> Course:
    """Train with DDP; over links, until the time limit or the case's accuracy is reached."""
    _, spec = specs(case)
    every = case.score_every // (spec.micro_batch * WORKERS) if scored else 0
    limit_s = case.peer_limit_s or case.limit_s
    if not over:
        return peer_ddp.train(spec, data_dir, WORKERS, score_every=every)
    return peer_ddp.train(spec, data_dir, WORKERS, over, every, limit_s, case.accuracy)


def compare(case: Case, pairs: int, data_dir: Path) -> tuple[list[Pair], Course | None]:
    """Train with both in turn, then with DDP without a link if the case is `unshaped`. Raises NoLinks."""
    document, _ = specs(case)
    done = []
    with (
        links(WORKERS, case.shape) as own,
        links(WORKERS, replace(case.shape, between=True), 1) as theirs,
        ours.plane(WORKERS, data_dir, own) as plane,
    ):
        for _ in range(pairs):
            trained = ours.train(plane, document, case.limit_s)
            done.append(Pair(trained, train_peer(case, data_dir, theirs, not case.unshaped)))
            rates = trained.course.samples_per_s, done[-1].peer.samples_per_s
            print("ComputeShare {:.1f}   DDP {:.1f} samples/s".format(*rates), file=sys.stderr, flush=True)
    return done, train_peer(case, data_dir, None, True) if case.unshaped else None


def tell(name: str, case: Case, pairs: list[Pair], apart: Course | None) -> Part:
    """The report's part about one case."""
    rows = [paired(label, [(value(p.ours.course), value(p.peer)) for p in pairs]) for label, value in RATES.items()]
    if case.score_every:
        rows += _accuracy_rows(case, pairs, apart)
    rows.append(["computing, share of the time", median([min(p.ours.busy.values()) for p in pairs]), None, None])
    lost = sorted({why for p in pairs for why in p.ours.left if "heard of" in why})
    note = f"Pairs: {len(pairs)}; workers taken for dead: {len(lost)}."
    shape = f"{case.shape.rate_mbit:g} Mbit/s each way per worker, {case.shape.rtt_ms:g} ms of added round trip"
    table = Table(f"{name}: {shape}", ["median of", "ComputeShare", "DDP", "ratio"], rows, note)
    details = [{"ours": _ours(p.ours), "ddp": _summary(p.peer)} for p in pairs]
    return Part([table], _plots(name, pairs, apart), {name: details})


RATES: dict[str, Callable[[Course], float]] = {
    "rounds/s": lambda course: course.rounds_per_s,
    "samples/s": lambda course: course.samples_per_s,
    "kB up a round, all workers": lambda course: course.bytes_per_round[0] / 1000,
    "kB down a round, all workers": lambda course: course.bytes_per_round[1] / 1000,
}


def _accuracy_rows(case: Case, pairs: list[Pair], apart: Course | None) -> list[list[Cell]]:
    both = [(p.ours.course, apart or p.peer) for p in pairs]
    samples = min(course.points[-1].samples for pair in both for course in pair)
    at = [(a.accuracy_at(samples), b.accuracy_at(samples)) for a, b in both]
    rows = [[*paired(f"accuracy after {samples:,} samples, %", [(_percent(a), _percent(b)) for a, b in at])[:3], None]]
    if case.accuracy is not None:
        reached = [(a.reached(case.accuracy), b.reached(case.accuracy)) for a, b in both]
        for label, value in TO_ACCURACY.items():
            row = [tuple(value(point) if point else None for point in pair) for pair in reached]
            rows.append(paired(f"{label} to {case.accuracy:.1%}", [(a, b) for a, b in row]))
    return rows


TO_ACCURACY: dict[str, Callable[[Point], float]] = {
    "seconds": lambda point: point.seconds,
    "samples": lambda point: point.samples,
    "MB up and down": lambda point: (point.bytes_up + point.bytes_down) / 1e6,
}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _plots(name: str, pairs: list[Pair], apart: Course | None) -> list[Plot]:
    """Plots of accuracy over time for the last pair."""
    lines = {"ComputeShare": _line(pairs[-1].ours.course), "DDP": _line(pairs[-1].peer)}
    lines |= {"DDP, no link": _line(apart)} if apart else {}
    if not any(lines.values()):
        return []
    return [Plot(name, f"{name}: test accuracy over time", "seconds", "%", lines)]


def _line(course: Course) -> list[list[float]]:
    return [[p.seconds, 100 * course.accuracy[p.version]] for p in course.points if p.version in course.accuracy]


def _summary(course: Course) -> dict[str, Any]:
    """A course without its points."""
    first, last = course.timed()
    return {"first": asdict(first), "last": asdict(last), "accuracy": dict(course.accuracy)}


def _ours(trained: ours.Trained) -> dict[str, Any]:
    return {
        **_summary(trained.course),
        "milliseconds": trained.milliseconds,
        "busy": trained.busy,
        "left": trained.left,
        "spec": trained.job["spec"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ours", type=json.loads, default={}, help="fields of a JobSpec, as JSON")
    parser.add_argument("--rate", type=float, help="Mbit/s, in place of the case's")
    parser.add_argument("--rtt", type=float, help="milliseconds, in place of the case's")
    parser.add_argument("--limit", type=float, help="seconds of each measurement")
    parser.add_argument("--samples", type=int, help="how many both see")
    parser.add_argument("--score-every", type=int, help="samples between versions that are scored")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    found = []
    for name in options.case or CASES:
        case = _changed(CASES[name], options)
        found.append(tell(name, case, *compare(case, options.pairs, Settings().data_dir)))
        part = merged(found)
        print(markdown(found[-1]), flush=True)
        if options.json:
            part.save(options.json)


def _changed(case: Case, options: argparse.Namespace) -> Case:
    shape = {"rate_mbit": options.rate, "rtt_ms": options.rtt}
    given = {
        "shape": replace(case.shape, **_set(shape)),
        "ours": {**case.ours, **options.ours},
        "limit_s": options.limit,
        "peer_limit_s": options.limit,
        "samples": options.samples,
        "score_every": options.score_every,
    }
    return replace(case, **_set(given))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    try:
        main()
    except NoLinks as why:
        sys.exit(f"skipped: {why}")
