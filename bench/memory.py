"""Measures peak memory of processes by role, from the kernel (on other systems than Linux: sampled 4 times a second).

python -m bench.memory --model resnet18 --input 3 32 32 --rounds 10
python -m bench.memory --units 20000        # growth of resident memory while one worker computes this many units
"""

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.types import ENDED

EVERY_S = 0.25
SETTLED = 0.1
"""Fraction of a long job's units after which every process has all lasting memory: any further increase is growth."""
Pids = Mapping[str, list[int]]


@dataclass
class Memory:
    """Bytes by role and process: `idle` is resident memory when watching began, `peak` the most since then."""

    idle: dict[str, dict[int, int]] = field(default_factory=dict)
    peak: dict[str, dict[int, int]] = field(default_factory=dict)

    def look(self, roles: Pids) -> None:
        """Update the peaks."""
        for role, pids in roles.items():
            for pid in pids:
                with contextlib.suppress(psutil.Error, OSError):
                    known = self.peak.setdefault(role, {})
                    known[pid] = max(known.get(pid, 0), peak(pid))

    def above_idle(self, role: str) -> int | None:
        """The largest peak above idle of a process of this role; None if no such process ran when watching began."""
        idle = self.idle.get(role, {})
        found = [peak - idle[pid] for pid, peak in self.peak.get(role, {}).items() if pid in idle]
        return max(found, default=None)


def peak(pid: int) -> int:
    """A process's peak resident memory since `forget_peak`, in bytes (other than on Linux: the current value).

    Raises: psutil.Error, OSError: the process is gone.
    """
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return int(psutil.Process(pid).memory_info().rss)
    lines = (line.split() for line in status.read_text().splitlines())
    return next((1024 * int(line[1]) for line in lines if line[0] == "VmHWM:"), 0)


def forget_peak(pid: int) -> int:
    """Reset a process's peak; returns its current resident bytes. Raises psutil.Error: the process is gone."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(psutil.Process(pid).memory_info().rss)


@contextmanager
def watched(find: Callable[[], Pids]) -> Iterator[Memory]:
    """Watch the memory of the processes that `find` returns, asked repeatedly, until the end of the block."""
    memory, stop = Memory(), threading.Event()
    for role, pids in find().items():
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                memory.idle.setdefault(role, {})[pid] = forget_peak(pid)

    def look() -> None:
        while not stop.wait(EVERY_S):
            memory.look(find())

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        stop.set()
        thread.join()
        memory.look(find())


@dataclass
class Growth:
    """Samples of (units done, resident bytes) by role and process."""

    seen: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def look(self, roles: Pids, units: int) -> None:
        """Sample the resident memory of the processes."""
        for role, pids in roles.items():
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    resident = int(psutil.Process(pid).memory_info().rss)
                    self.seen.setdefault((role, pid), []).append((units, resident))

    def of(self, role: str, pid: int) -> tuple[float, float] | None:
        """Median bytes once settled and at the end, over a tenth of the units each; None without samples of both."""
        seen = self.seen[role, pid]
        last = seen[-1][0]
        early = [size for units, size in seen if SETTLED * last <= units <= 2 * SETTLED * last]
        late = [size for units, size in seen if units >= (1 - SETTLED) * last]
        return (statistics.median(early), statistics.median(late)) if early and late else None


def tell_growth(growth: Growth, units: int, seconds: float) -> Part:
    """A table with a row for each process that ran from the first tenth of the units to the last."""
    rows: list[list[Cell]] = []
    for role, pid in sorted(growth.seen):
        if found := growth.of(role, pid):
            settled, end = found
            rows.append([role, settled / 1e6, end / 1e6, 100 * (end / settled - 1)])
    columns = ["role", "settled, MB", "end, MB", "growth, %"]
    note = f"{units} units in {seconds:.0f} s; settled: after a tenth of them."
    return Part([Table("Resident memory over a long job", columns, rows, note)])


def tell(memory: Memory, spec: JobSpec) -> Part:
    """A table with a row for each role, for its process with the highest peak."""
    model = 4 * spec.parameters
    rows = []
    for role, peaks in memory.peak.items():
        above = memory.above_idle(role)
        idle = max(memory.idle.get(role, {}).values(), default=None)
        mb = [None if value is None else value / 1e6 for value in (idle, max(peaks.values()), above)]
        rows.append([role, len(peaks), *mb, None if above is None else above / model])
    columns = ["role", "processes", "idle, MB", "peak, MB", "above idle, MB", "above idle, model sizes"]
    note = f"A model of {model / 1e6:.1f} MB in float32. Seats come with the job: they have no idle."
    return Part([Table(f"Memory while training {spec.model}", columns, rows, note)])


def main() -> None:
    from bench.support import ours

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--input", type=int, nargs=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each round")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that training may take")
    parser.add_argument("--units", type=int, help="measure growth over so many units instead, of a small model")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    document = {
        "dataset": "mnist",
        "model": options.model,
        "input": options.input,
        "micro_batches_per_round": options.micro_batches,
        "rounds": options.rounds,
        "threads": 1,
        "checkpoint_every": 0,
        "evaluate_every": 0,
    }
    if options.units:
        _report(_grow(options.units, options.limit), options.json)
        return
    with ours.plane(2, Settings().data_dir) as plane:  # idle is who has had a job with next to no model
        ours.train(plane, document | {"model": "mlp", "input": [1, 8, 8], "rounds": 3})
        with watched(plane.pids) as memory:
            trained = ours.train(plane, document, options.limit)
    _report(tell(memory, JobSpec.model_validate(trained.job["spec"])), options.json)


def _grow(units: int, limit_s: float) -> Part:
    """Train a small model with one worker on a new control plane, and measure the growth of all its processes."""
    from bench.support import ours

    per_round = 4
    document = {"dataset": "digits", "model": "lenet5", "input": [1, 28, 28], "micro_batch": 16, "threads": 1}
    document |= {"micro_batches_per_round": per_round, "rounds": units // per_round, "queue": ours.QUEUE}
    growth, started = Growth(), time.monotonic()
    with ours.plane(1, Settings().data_dir) as plane:
        job = plane.client.create(document)
        while job["status"] not in ENDED:
            if time.monotonic() > started + limit_s:
                raise TimeoutError(f"version {job['version']} of {job['rounds_total']} after {limit_s:.0f} s")
            job = plane.client.show(job["id"])
            growth.look(plane.pids(), per_round * job["version"])
            time.sleep(EVERY_S)
    if job["status"] != "completed":
        raise RuntimeError(f"the job is {job['status']}: {job['error']}")
    return tell_growth(growth, units, time.monotonic() - started)


def _report(part: Part, to: Path | None) -> None:
    print(markdown(part))
    if to:
        part.save(to)


if __name__ == "__main__":
    main()
