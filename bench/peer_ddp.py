"""The peer: torch over gloo, by one of `peer_methods`, on the same model, data and batches.

Each rank is a process of its own, on this machine's loopback or each behind a thin link.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench.links import Links
from bench.support.course import Course, Point
from bench.support.meter import Meter, metered
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.processes import PARENT, exit_with_parent
from computeshare.up.embedded_broker import free_port

START_S = 600.0
"""Time limit until the ranks begin to train: before, they send all weights once, minutes over a thin link."""
EXTENSIONS = 9
"""How often a time limit is extended by as much again, until there are two versions to tell a rate from."""
TELL_S = 0.25
"""Seconds between reports of rank 0: seldom, so that the reader of the reports does not compete for CPU time."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The arguments of one rank's process."""

    rank: int
    ranks: int
    address: str
    interface: str
    spec: str
    data_dir: str
    bundles: str
    score_every: int
    method: str


def train(
    spec: JobSpec,
    data_dir: Path,
    ranks: int = 2,
    links: Links | None = None,
    score_every: int = 0,
    limit_s: float | None = None,
    until: float | None = None,
    method: str = "ddp",
    bundles: Path | None = None,
) -> Course:
    """Train with `ranks` processes, one micro-batch each per round, `spec.threads` (or one) threads each.

    Args:
        links: at least one link per rank; None: loopback.
        score_every: versions between scores of rank 0's weights, outside of the measured time; 0: never.
        limit_s: end after this many seconds of training.
        until: end once this test accuracy (a fraction) is reached.
        method: how the ranks train together, one of `peer_methods.METHODS`.
        bundles: folder with the files of the spec's data set, if a user added it.
    Raises: RuntimeError: a rank failed, or there was no version in time.
    """
    host = links.each[0].address if links else "127.0.0.1"
    interface = links.interface if links else ("lo0" if sys.platform == "darwin" else "lo")
    address = f"tcp://{host}:{free_port()}"
    shared = (ranks, address, interface, spec.model_dump_json(), str(data_dir), str(bundles or ""), score_every, method)
    with tempfile.TemporaryFile("w+") as log, metered(links) as meter:
        processes = [_start(Rank(rank, *shared), links, log) for rank in range(ranks)]
        clock = Clock(processes)
        try:
            told = list(_listen(processes[0], clock, limit_s, until))
        finally:
            clock.end()
        if not any("version" in line for line in told):
            log.seek(0)
            raise RuntimeError(f"{method} made no version:\n{log.read()[-2000:]}")
    return course(told, spec.micro_batch * ranks, meter)


class Clock:
    """Kills the ranks when their time is over: otherwise they would wait for one another forever."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.versions = 0
        """The number of versions reported so far."""
        self._timer = self._started(START_S, 0)

    def limit(self, seconds: float | None) -> None:
        """Replace the time limit, counted from now; None: no limit. It is extended until there are two versions."""
        self._timer.cancel()
        if seconds:
            self._timer = self._started(seconds, EXTENSIONS)

    def _started(self, seconds: float, extensions: int) -> threading.Timer:
        timer = threading.Timer(seconds, self._expire, (seconds, extensions))
        timer.daemon = True
        timer.start()
        return timer

    def _expire(self, seconds: float, extensions: int) -> None:
        if extensions and self.versions < 2:
            self._timer = self._started(seconds, extensions - 1)
        else:
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Kill all ranks and wait for their end."""
        self._timer.cancel()
        self._kill()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()


def _start(rank: Rank, links: Links | None, log: IO[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.peer_ddp"]
    if links:
        command = links.each[rank.rank].inside(command)
    environment = {**os.environ, PARENT: str(os.getpid()), "GLOO_SOCKET_IFNAME": rank.interface}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdin
    with process.stdin as told:
        json.dump(asdict(rank), told)
    return process


def _listen(
    process: "subprocess.Popen[str]", clock: Clock, limit_s: float | None, until: float | None
) -> Iterator[dict[str, Any]]:
    """The lines that rank 0 reports, until it ends or reaches the accuracy `until`."""
    assert process.stdout
    for text in process.stdout:
        try:
            line = json.loads(text)
        except ValueError:  # cut off by the clock
            return
        if "began" in line:
            clock.limit(limit_s)
        clock.versions += "seconds" in line
        yield line
        if until is not None and line.get("accuracy", 0.0) >= until:
            return


def course(told: list[dict[str, Any]], samples: int, meter: Meter) -> Course:
    """The course of a training from rank 0's reports, with `samples` per round."""
    start = next(line for line in told if "began" in line)
    points = tuple(
        Point(line["version"], line["seconds"], line["version"] * samples, *meter.between(start["began"], line["at"]))
        for line in told
        if "seconds" in line
    )
    accuracy = {line["version"]: line["accuracy"] for line in told if "accuracy" in line}
    return Course(points, accuracy, start.get("compute_s", 0.0))


def _train(told: Rank) -> None:
    """Train as one rank; rank 0 prints its reports as lines of JSON."""
    import torch
    import torch.distributed as dist

    from bench.peer_methods import METHODS, compute_s
    from computeshare.bundles.store import BundleStore
    from computeshare.tasks.metrics import score
    from computeshare.tasks.modules import weights_of
    from computeshare.tasks.registry import task_of

    spec = JobSpec.model_validate_json(told.spec)
    torch.set_num_threads(spec.threads or 1)
    task = task_of(spec, BundleStore(Path(told.bundles)) if told.bundles else None)
    instance = task.instance(spec.seed, "train", Path(told.data_dir))
    module, split, method = instance.module.train(), instance.split, METHODS[told.method]

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, spec.optimizer.name)(parameters, **spec.optimizer.arguments)
        return made

    dist.init_process_group("gloo", init_method=told.address, rank=told.rank, world_size=told.ranks)
    batch = split.batch(spec.plan.indices(told.rank))
    step = method.build(module, optimizer_of, task.loss, batch)
    dist.barrier()
    computing_s = compute_s(module, optimizer_of, task.loss, batch)
    dist.barrier()
    report = Report(told.rank, computing_s)
    report.tell()  # the time limit of the training counts from here
    for version in range(1, spec.rounds_total + 1):
        step(split.batch(spec.plan.indices((version - 1) * told.ranks + told.rank)))
        if version % method.every == 0:
            report.version(version)
        if told.score_every and version % told.score_every == 0:
            report.pause()
            if told.rank == 0:
                judge = task.instance(spec.seed, "test", Path(told.data_dir))
                report.accuracy(version, score(judge, weights_of(module, judge.layout)).metrics["accuracy"])
            dist.barrier()
            report.resume()
    report.tell()
    dist.barrier()
    dist.destroy_process_group()


class Report:
    """Collects the lines about versions, which rank 0 prints; `seconds` exclude pauses."""

    def __init__(self, rank: int, compute_s: float) -> None:
        """`compute_s`: seconds of a step without communication."""
        self._lines: list[dict[str, float]] = [{"began": time.time(), "compute_s": compute_s}]
        self._told = self._started = time.perf_counter()
        self._before_s = 0.0
        self._speaks = rank == 0

    def version(self, version: int) -> None:
        now = time.perf_counter()
        self._lines.append({"version": version, "at": time.time(), "seconds": self._before_s + now - self._started})
        if now - self._told > TELL_S:
            self._told = now
            self.tell()

    def accuracy(self, version: int, accuracy: float) -> None:
        self._lines.append({"version": version, "accuracy": accuracy})
        self.tell()

    def pause(self) -> None:
        self._before_s += time.perf_counter() - self._started

    def resume(self) -> None:
        self._started = time.perf_counter()

    def tell(self) -> None:
        if self._speaks:
            print("\n".join(map(json.dumps, self._lines)), flush=True)
        self._lines.clear()


if __name__ == "__main__":
    exit_with_parent()
    _train(Rank(**json.load(sys.stdin)))
