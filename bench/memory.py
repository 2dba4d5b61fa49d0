"""Peak memory of processes by role, as the kernel noted it (other than on Linux: as it was seen four times a second).

python -m bench.memory --model resnet18 --input 3 32 32 --rounds 10
"""

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.ending import end_cleanly_when_asked
from bench.report import Part, Table, markdown
from computeshare.settings import Settings
from computeshare.spec import JobSpec

EVERY_S = 0.25
Pids = Mapping[str, list[int]]


@dataclass
class Memory:
    """Bytes by role and process: `idle` resident when watching began, for those that were there; `peak` since."""

    idle: dict[str, dict[int, int]] = field(default_factory=dict)
    peak: dict[str, dict[int, int]] = field(default_factory=dict)

    def look(self, roles: Pids) -> None:
        """Note what the processes have taken at most."""
        for role, pids in roles.items():
            for pid in pids:
                with contextlib.suppress(psutil.Error, OSError):
                    known = self.peak.setdefault(role, {})
                    known[pid] = max(known.get(pid, 0), peak(pid))

    def above_idle(self, role: str) -> int | None:
        """The most that a process of this role took beyond what it had when idle; None: none was there then."""
        idle = self.idle.get(role, {})
        found = [peak - idle[pid] for pid, peak in self.peak.get(role, {}).items() if pid in idle]
        return max(found, default=None)


def peak(pid: int) -> int:
    """The most memory a process had resident since `forget_peak`, in bytes. Raises psutil.Error or OSError: gone."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return int(psutil.Process(pid).memory_info().rss)
    lines = (line.split() for line in status.read_text().splitlines())
    return next((1024 * int(line[1]) for line in lines if line[0] == "VmHWM:"), 0)


def forget_peak(pid: int) -> int:
    """Begin anew with what the process has resident now, which is returned. Raises psutil.Error: it is gone."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(psutil.Process(pid).memory_info().rss)


@contextmanager
def watched(find: Callable[[], Pids]) -> Iterator[Memory]:
    """The memory of the processes that `find` names now and then, to the end of the block."""
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


def tell(memory: Memory, spec: JobSpec) -> Part:
    """A row for each role; with several processes of one role, the one that took the most."""
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
    from bench import ours

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--input", type=int, nargs=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each round")
    parser.add_argument("--limit", type=float, default=120, help="seconds")
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
    with ours.plane(2, Settings().data_dir) as plane:  # idle is who has had a job with next to no model
        ours.train(plane, document | {"model": "mlp", "input": [1, 8, 8], "rounds": 3})
        with watched(plane.pids) as memory:
            trained = ours.train(plane, document, options.limit)
    part = tell(memory, JobSpec.model_validate(trained.job["spec"]))
    print(markdown(part))
    if options.json:
        part.save(options.json)


if __name__ == "__main__":
    main()
