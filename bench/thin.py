"""Compares ComputeShare with what torch offers over thin links: rates, computing time, bytes, and accuracy.

    python -m bench.thin --case simplenet-20mbit --runs 5
    python -m bench.thin --case resnet18-20mbit --ours '{"sync float16": {"codec": {"up": "float16"}}}' --limit 120
    python -m bench.thin --case resnet18-20mbit --plot --runs 1

All take turns on the same model, data and links, with two workers or ranks of one thread each. Peers get one
micro-batch for each rank and round; a case's `ours`, or `--ours`, holds JobSpec fields that differ for ComputeShare, by
name, of which `--only` selects some. Each of `--runs` has a seed of its own, from 0. Each measurement ends after
`--limit` seconds, so that only a few of the slow rounds are measured. A case with an accuracy compares accuracy after
equal samples, and the time to it; where that would take hours over the link, a peer's accuracy comes from a run without
a link. The time never includes scoring. `--plot` measures at rates from 2 to 1,000 Mbit/s, or at those given, in place
of the case's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import peer_ddp
from bench.links import Links, NoLinks, Shape, links
from bench.peer_methods import METHODS
from bench.support import ours, shapes
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.course import Course, Point
from bench.support.report import Cell, Part, Plot, Table, cell, markdown, median, merged, spread
from bench.thin_cases import CASES, NO_DATA, WORKERS, Case, selected, specs
from computeshare.settings import Settings
from computeshare.tasks.registry import task_of

RATES_MBIT = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The links of `--plot`."""
LIMITED_MBIT = 20
"""From this rate on a measurement of `--plot` takes the case's limit, below it as much longer as the link is slower."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one system. `busy`: the share of its time that the worker that computed least computed."""

    course: Course
    busy: float
    details: Mapping[str, Any] = field(default_factory=dict)
    lost: int = 0
    """The number of workers taken for dead."""


@dataclass(frozen=True, slots=True)
class Found:
    """The runs of a case by system; `apart`: the peers' without a link."""

    ours: Mapping[str, Sequence[Run]]
    peers: Mapping[str, Sequence[Run]]
    apart: Mapping[str, Sequence[Run]]


def compare(case: Case, runs: int, data_dir: Path) -> Found:
    """Train with all in turn, with a seed for each run; with the peers also without a link if the case is `unshaped`.

    Raises: NoLinks.
    """
    with (
        links(WORKERS, case.shape) as ours_links,
        links(WORKERS, replace(case.shape, between=True), 1) as theirs,
        ours.plane(WORKERS, data_dir, ours_links) as plane,
    ):
        documents, spec = specs(case, _images(plane, case.images) if case.images else NO_DATA)
        scored = "accuracy" in task_of(spec).metrics
        own: dict[str, list[Run]] = {name: [] for name in documents}
        peers: dict[str, list[Run]] = {METHODS[method].label: [] for method in case.peers}
        apart: dict[str, list[Run]] = {METHODS[method].label: [] for method in case.peers if case.unshaped}

        def train_peer(method: str, seed: int, over: Links | None, scored: bool) -> Run:
            """Train with a peer; over links, until the time limit or the case's accuracy is reached."""
            every = case.score_every // (spec.micro_batch * WORKERS) if scored else 0
            limit_s, accuracy = (case.peer_limit_s or case.limit_s, case.accuracy) if over else (None, None)
            bundles = plane.stack.settings.bundles_dir
            seeded = spec.model_copy(update={"seed": seed})
            course = peer_ddp.train(seeded, data_dir, WORKERS, over, every, limit_s, accuracy, method, bundles)
            label = METHODS[method].label if over else _no_link(METHODS[method].label)
            return _told(label, Run(course, course.busy, _summary(course)))

        for seed in range(runs):
            for name, document in documents.items():
                trained = ours.train(plane, {**document, "seed": seed}, case.limit_s, scored)
                own[name].append(_told(name, _ours(trained)))
            for method in case.peers:
                label = METHODS[method].label
                peers[label].append(train_peer(method, seed, theirs, not case.unshaped))
                if case.unshaped:
                    apart[label].append(train_peer(method, seed, None, True))
        return Found(own, peers, apart)


def _images(plane: ours.Plane, count: int) -> dict[str, Any]:
    """Make so many JPEGs, and add them as a data set, which is returned."""
    with tempfile.TemporaryDirectory() as folder:
        shapes.write(Path(folder), count)
        return ours.add_data(plane, "shapes", Path(folder))


def _told(name: str, run: Run) -> Run:
    scores = "".join(f", {version}: {score:.2%}" for version, score in run.course.accuracy.items())
    rate = f"{run.course.samples_per_s:.1f} samples/s, computing {run.busy:.0%}"
    print(f"{name}: {rate}{scores}", file=sys.stderr, flush=True)
    return run


def tell(name: str, case: Case, found: Found) -> Part:
    """The report's part about one case."""
    everyone = {f"ComputeShare: {label}": runs for label, runs in found.ours.items()} | {**found.peers}
    columns: dict[str, Column] = {
        **RATES,
        "round's time by the formula": partial(_formula, case.shape),
        **_accuracy_columns(case, found),
    }
    rows: list[list[Cell]] = [
        [label, *(column(label, runs) for column in columns.values())] for label, runs in everyone.items()
    ]
    shape = f"{case.shape.rate_mbit:g} Mbit/s each way per worker, {case.shape.rtt_ms:g} ms of added round trip"
    table = Table(f"{name}: {shape}", ["medians", *columns], rows, _verdict(found))
    details = {label: [run.details for run in runs] for label, runs in everyone.items()}
    details |= {_no_link(label): [run.details for run in runs] for label, runs in found.apart.items()}
    return Part([table], _plots(name, everyone, found.apart), {name: details})


Column = Callable[[str, Sequence[Run]], Cell]
"""A cell about the runs of a system, which is named."""


RATES: dict[str, Column] = {
    "samples/s": lambda _, runs: median([run.course.samples_per_s for run in runs]),
    "range": lambda _, runs: spread([run.course.samples_per_s for run in runs]),
    "computing, share of the time": lambda _, runs: median([run.busy for run in runs]),
    "rounds/s": lambda _, runs: median([run.course.rounds_per_s for run in runs]),
    "kB up a round, all workers": lambda _, runs: median([run.course.bytes_per_round[0] / 1000 for run in runs]),
    "kB down a round, all workers": lambda _, runs: median([run.course.bytes_per_round[1] / 1000 for run in runs]),
}


def _formula(shape: Shape, _: str, runs: Sequence[Run]) -> Cell:
    return median([_by_formula(run, shape) for run in runs])


def _by_formula(run: Run, shape: Shape) -> float | None:
    """A round's time as a multiple of what it should be: computing, then the longer way of a worker's bytes, and a
    round trip. Below 1 where they are sent during computing; None: the link has no rate.
    """
    if not shape.rate_mbit:
        return None
    round_s, moved = 1 / run.course.rounds_per_s, max(run.course.bytes_per_round) / WORKERS
    return round_s / (run.busy * round_s + 8e-6 * moved / shape.rate_mbit + shape.rtt_ms / 1000)


def _verdict(found: Found) -> str:
    """The rate of our fastest configuration as a multiple of the best peer's, and of plain DDP's."""
    lead, mine = max(found.ours.items(), key=_rate)
    best, _ = max(found.peers.items(), key=_rate, default=("", ()))
    plain = METHODS["ddp"].label
    told = []
    for peer in dict.fromkeys(each for each in (best, plain) if each in found.peers):
        ratios = [a.course.samples_per_s / b.course.samples_per_s for a, b in zip(mine, found.peers[peer], strict=True)]
        kind = "the best peer" if peer == best else "with its defaults"
        told.append(f"{cell(median(ratios))} times {peer}, {kind} ({spread(ratios)})")
    lost = sum(run.lost for runs in found.ours.values() for run in runs)
    return f"{lead}: {'; '.join(told) or 'no peer'}. Runs: {len(mine)}; workers taken for dead: {lost}."


def _rate(item: tuple[str, Sequence[Run]]) -> float:
    return median([run.course.samples_per_s for run in item[1]]) or 0.0


def _accuracy_columns(case: Case, found: Found) -> dict[str, Column]:
    if not case.score_every:
        return {}

    def scored(label: str, runs: Sequence[Run]) -> list[Course]:
        return [run.course for run in found.apart.get(label, runs)]

    everyone = [course for group in (found.ours, found.peers) for item in group.items() for course in scored(*item)]
    samples = min(course.points[-1].samples for course in everyone)

    def reached(value: Callable[[Point], float], courses: list[Course]) -> Cell:
        points = [course.reached(case.accuracy or 0.0) for course in courses]
        return median([value(point) if point else None for point in points])

    def percents(label: str, runs: Sequence[Run]) -> list[float | None]:
        found = [course.accuracy_at(samples) for course in scored(label, runs)]
        return [None if share is None else 100 * share for share in found]

    columns: dict[str, Column] = {
        f"accuracy after {samples:,} samples, %": lambda label, runs: median(percents(label, runs)),
        "range of accuracy": lambda label, runs: spread(percents(label, runs)),
    }
    for what, value in TO_ACCURACY.items() if case.accuracy is not None else ():
        columns[f"{what} to {case.accuracy:.1%}"] = lambda label, runs, v=value: reached(v, scored(label, runs))  # type: ignore[misc]
    return columns


TO_ACCURACY: dict[str, Callable[[Point], float]] = {
    "seconds": lambda point: point.seconds,
    "samples": lambda point: point.samples,
    "MB up and down": lambda point: (point.bytes_up + point.bytes_down) / 1e6,
}


def _plots(name: str, everyone: Mapping[str, Sequence[Run]], apart: Mapping[str, Sequence[Run]]) -> list[Plot]:
    """Plots of accuracy over time for the last runs."""
    lines = {label: _line(runs[-1].course) for label, runs in everyone.items()}
    lines |= {_no_link(label): _line(runs[-1].course) for label, runs in apart.items()}
    lines = {label: line for label, line in lines.items() if line}
    return [Plot(name, f"{name}: test accuracy over time", "seconds", "%", lines)] if lines else []


def _no_link(label: str) -> str:
    return f"{label}, no link"


def _line(course: Course) -> list[list[float]]:
    return [[p.seconds, 100 * course.accuracy[p.version]] for p in course.points if p.version in course.accuracy]


def sweep(name: str, case: Case, rates: Sequence[float], runs: int, data_dir: Path) -> Iterator[Part]:
    """Measure at one rate of the link after another; yields the report about all rates so far. Raises NoLinks."""
    by_rate: dict[float, ByLabel] = {}
    for rate in rates:
        print(f"{rate:g} Mbit/s", file=sys.stderr, flush=True)
        slower, shape = max(1.0, LIMITED_MBIT / rate), replace(case.shape, rate_mbit=rate)
        limit_s, peer_limit_s = slower * case.limit_s, slower * case.peer_limit_s
        shaped = replace(case, shape=shape, limit_s=limit_s, peer_limit_s=peer_limit_s)
        found = compare(shaped, runs, data_dir)
        by_rate[rate] = {f"ComputeShare: {label}": each for label, each in found.ours.items()} | {**found.peers}
        yield _swept(name, by_rate, runs)


ByLabel = Mapping[str, Sequence[Run]]
"""The runs of each system."""


def _swept(name: str, by_rate: Mapping[float, ByLabel], runs: int) -> Part:
    """Medians of samples per second and of the share of time spent computing, by the link's rate."""
    labels = list(next(iter(by_rate.values())))
    rows: list[list[Cell]] = []
    for rate, everyone in by_rate.items():
        busy = [median([run.busy for run in runs]) or 0.0 for runs in everyone.values()]
        pairs = zip(everyone.items(), busy, strict=True)
        rows.append([rate, *(f"{cell(_rate(item))} ({share:.0%})" for item, share in pairs)])
    title = f"{name}: samples/s, and the share of time spent computing"
    lines = {label: [[rate, _rate((label, each[label]))] for rate, each in by_rate.items()] for label in labels}
    plot = Plot(f"{name}-rates", f"{name}: samples/s by the link's rate", "Mbit/s", "samples/s", lines, True)
    details = {
        f"{rate:g} Mbit/s": {label: [run.details for run in done] for label, done in everyone.items()}
        for rate, everyone in by_rate.items()
    }
    return Part([Table(title, ["Mbit/s", *labels], rows, f"Runs: {runs}.")], [plot], {f"{name} by rate": details})


def _summary(course: Course) -> dict[str, Any]:
    """A course without its points."""
    first, last = course.timed()
    return {"first": asdict(first), "last": asdict(last), "accuracy": dict(course.accuracy), "step_s": course.step_s}


def _ours(trained: ours.Trained) -> Run:
    details = {
        **_summary(trained.course),
        "milliseconds": trained.milliseconds,
        "busy": trained.busy,
        "left": trained.left,
        "spec": trained.job["spec"],
    }
    lost = sum("heard of" in why for why in trained.left)
    return Run(trained.course, min(trained.busy.values(), default=0.0), details, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--runs", type=int, default=5, help="runs of each system, in turns")
    parser.add_argument("--plot", nargs="*", type=float, metavar="MBIT", help="measure at these rates, or at nine")
    parser.add_argument("--ours", type=json.loads, help="fields of JobSpecs by name, as JSON, in place of the case's")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the configurations of ComputeShare, these alone")
    parser.add_argument("--peers", nargs="*", choices=METHODS, help="in place of the case's; none: ours alone")
    parser.add_argument("--rate", type=float, help="Mbit/s, in place of the case's")
    parser.add_argument("--rtt", type=float, help="milliseconds, in place of the case's")
    parser.add_argument("--limit", type=float, help="seconds of each measurement")
    parser.add_argument("--samples", type=int, help="how many all see")
    parser.add_argument("--images", type=int, help="JPEGs to make and train on, in place of the case's data set")
    parser.add_argument("--score-every", type=int, help="samples between versions that are scored")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    told: list[Part] = []
    for name, case in {name: _changed(CASES[name], options) for name in options.case or CASES}.items():
        for part in _parts(name, case, options):
            if options.json:
                merged([*told, part]).save(options.json)
        print(markdown(part), flush=True)
        told.append(part)


def _parts(name: str, case: Case, options: argparse.Namespace) -> Iterator[Part]:
    """The reports about a case, each in place of the one before, as far as it is measured."""
    data_dir = Settings().data_dir
    if options.plot is None:
        yield tell(name, case, compare(case, options.runs, data_dir))
    else:
        yield from sweep(name, case, options.plot or RATES_MBIT, options.runs, data_dir)


def _changed(case: Case, options: argparse.Namespace) -> Case:
    shape = {"rate_mbit": options.rate, "rtt_ms": options.rtt}
    given = {
        "shape": replace(case.shape, **_set(shape)),
        "ours": selected(options.ours or case.ours, options.only),
        "peers": options.peers,
        "limit_s": options.limit,
        "peer_limit_s": options.limit,
        "samples": options.samples,
        "images": options.images,
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
