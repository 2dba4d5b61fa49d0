"""Measures the recovery time after a process was killed or woken up, against the goals.

    python -m bench.recovery --trials 50 --broker-trials 20

Every trial appends a line to reliability-results.jsonl; stored trials on the same sources are not repeated.
`reducer`: from SIGKILL of the active reducer to the next version; the next trial begins as soon as versions come again,
whether or not another reducer stands by. `large reducer`: the same for `vgg16` with momentum, whose weights and
optimizer state are half a gigabyte each. `worker`: from SIGKILL of one of two workers and its
seat to the version of its round, completed by the other worker. `only worker`: the same for the only worker with
leases, while an idle worker has to get the seat and load everything first. `broker`: from SIGKILL to the next version
after the job was restored. `wake`: from SIGCONT of a worker stopped for some seconds to its next accepted submission.
"""

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from redis.exceptions import RedisError

from bench.stage import Stage, stage
from bench.support.results import PRODUCT, RELIABILITY, append, digest, load, percentile
from bench.support.wait import wait_until
from computeshare.protocol.keys import JobKeys
from computeshare.queue import list_workers

SPEC: dict[str, Any] = {
    "name": "bench: recovery",
    "dataset": "digits",
    "model": "mlp",
    "micro_batch": 32,
    "micro_batches_per_round": 4,
    "rounds": 10_000_000,
    "threads": 1,
    "checkpoint_every": 500,
    "evaluate_every": 0,
}
LARGE: dict[str, Any] = {
    "model": "vgg16",
    "input": [3, 32, 32],
    "micro_batch": 1,
    "micro_batches_per_round": 1,
    "optimizer": {"name": "SGD", "lr": 0.001, "momentum": 0.9},
    "codec": {"up": "int8"},
    "checkpoint_every": 0,
}
LARGE_TRIALS = 3
"""The most trials with the large model."""
PATIENCE_S = 120.0
ASLEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of trial, its number of seats, the goal for every trial in seconds, and what its job has beside `SPEC`."""

    trial: Callable[["Trial"], float]
    seats: int
    goal_s: float
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trial:
    """One job on one stage, with a method for each kind of trial that returns the seconds to recovery."""

    stage: Stage
    job_id: str
    seats: int
    rng: random.Random

    def settle(self) -> None:
        """Wait until all seats have joined, two workers run, and versions come; then up to 0.5 s."""
        self._until(self._settled, "everyone to be there")
        version = self.version()
        self._until(lambda: self.version() > version, "versions to come")
        time.sleep(self.rng.uniform(0, 0.5))  # a different moment of a round each time

    def _settled(self) -> bool:
        self.stage.tend()
        with contextlib.suppress(RedisError, psutil.Error):
            joined: Any = self.stage.redis.hkeys(JobKeys(self.job_id).sessions())
            names = [worker_of(seat).encode() for seat in self.stage.seats()]
            return len(list_workers(self.stage.redis)) >= 2 and len(names) >= self.seats and set(names) <= set(joined)
        return False

    def version(self) -> int:
        state = self.stage.rounds(self.job_id)
        return state.version if state else -1

    def next_version(self, after: int) -> float:
        """Wait for a version above `after`; returns the seconds waited."""
        return self._until(lambda: self.version() > after, f"version {after + 1}")

    def _until(self, true: Callable[[], bool], what: str) -> float:
        return wait_until(true, f"{what}; logs in {self.stage.home / 'logs'}", PATIENCE_S, every_s=0.005)

    # The kinds of trials

    def reducer(self) -> float:
        victim = self.stage.active_reducer(self.job_id)
        assert victim is not None
        victim.send_signal(signal.SIGSTOP)  # so that it commits nothing between the read of the version and its end
        self._until(lambda: victim.status() == psutil.STATUS_STOPPED, "the reducer to stop")
        self.version()  # between two exchanges, the broker executes all that others had sent before the first
        version = self.version()
        victim.kill()
        return self.next_version(version)

    def worker(self) -> float:
        seat = self._stopped_with_a_lease()
        version = self.version()
        psutil.Process(seat.ppid()).kill()
        seat.kill()
        return self.next_version(version)

    def _stopped_with_a_lease(self) -> psutil.Process:
        """Stop a seat's process that holds a lease, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for seat in self.stage.seats():
                seat.send_signal(signal.SIGSTOP)
                leases: Any = self.stage.redis.hvals(JobKeys(self.job_id).leases())
                if any(lease.endswith(b"|" + worker_of(seat).encode()) for lease in leases):
                    return seat
                seat.send_signal(signal.SIGCONT)
                time.sleep(self.rng.uniform(0, 0.05))
        raise TimeoutError("no worker was caught with a lease")

    def broker(self) -> float:
        victim, before = self.stage.process("broker"), self.stage.rounds(self.job_id)
        assert victim is not None and before is not None
        victim.kill()
        started = time.monotonic()
        restored = -1

        def advanced() -> bool:
            nonlocal restored
            state = self.stage.rounds(self.job_id)
            if state is None or state.token.incarnation == before.token.incarnation:
                return False
            restored = state.version if restored < 0 else restored
            return state.version > restored

        self._until(advanced, "a version after the broker's death")
        return time.monotonic() - started

    def wake(self) -> float:
        seat = self.rng.choice(self.stage.seats())
        name, victims = worker_of(seat), [psutil.Process(seat.ppid()), seat]
        for victim in victims:
            victim.send_signal(signal.SIGSTOP)
        time.sleep(ASLEEP_S)
        last: Any = self.stage.redis.xinfo_stream(JobKeys(self.job_id).events())["last-generated-id"]
        for victim in victims:
            victim.send_signal(signal.SIGCONT)
        started = time.monotonic()
        while time.monotonic() - started < PATIENCE_S:
            reply: Any = self.stage.redis.xread({JobKeys(self.job_id).events(): last}, block=1000)
            for _, entries in reply.items() if isinstance(reply, dict) else reply:
                for stream_id, fields in entries[0] if isinstance(reply, dict) else entries:
                    last, data = stream_id, fields[b"data"]
                    if b'"outcome":"accepted"' in data and f'"worker":"{name}"'.encode() in data.replace(b": ", b":"):
                        return time.monotonic() - started
        raise TimeoutError(f"worker {name} never took part again; logs in {self.stage.home / 'logs'}")


CASES = {
    "reducer": Case(Trial.reducer, 2, 5),
    "large reducer": Case(Trial.reducer, 1, 10, LARGE),
    "worker": Case(Trial.worker, 2, 30),
    "only worker": Case(Trial.worker, 1, 30),
    "wake": Case(Trial.wake, 2, 10),
    "broker": Case(Trial.broker, 2, 15),
}


def worker_of(seat: psutil.Process) -> str:
    return str(seat.environ()["RQ_WORKER_ID"])


def done(name: str, sources: str) -> list[float]:
    """The seconds of every stored trial of this case on these sources."""
    mine = [entry for entry in load(RELIABILITY) if (entry["bench"], entry.get("sources")) == ("recovery", sources)]
    return [entry["seconds"] for entry in mine if entry["case"] == name]


def measure(name: str, trials: int, sources: str) -> None:
    """Run the missing trials of a case."""
    case, first = CASES[name], len(done(name, sources))
    if first >= trials:
        return
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder) / "home", workers=2) as up:
        spec = {**SPEC, **case.spec, "workers": {"min": 1, "max": case.seats}}
        trial = Trial(up, up.create(spec), case.seats, random.Random(first))
        for number in range(first, trials):
            trial.settle()
            seconds = round(case.trial(trial), 3)
            append(RELIABILITY, {"bench": "recovery", "case": name, "seconds": seconds, "sources": sources})
            print(f"{name} {number + 1} of {trials}: {seconds:.2f} s", flush=True)


def table(sources: str) -> tuple[str, bool]:
    """A table with a line for each case, and whether every trial met its goal."""
    lines, met = [f"{'case':<14}{'trials':>8}{'median':>10}{'95 %':>10}{'worst':>10}{'goal':>8}"], True
    for name, case in CASES.items():
        if seconds := done(name, sources):
            met = met and max(seconds) <= case.goal_s
            figures = f"{statistics.median(seconds):>10.2f}{percentile(seconds, 0.95):>10.2f}{max(seconds):>10.2f}"
            lines.append(f"{name:<14}{len(seconds):>8}{figures}{case.goal_s:>8.0f}")
    return "\n".join(lines), met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--broker-trials", type=int, default=20)
    parser.add_argument("--case", choices=CASES, action="append", help="this one alone; may be given several times")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    sources = digest(PRODUCT)
    trials = {"broker": options.broker_trials, "large reducer": min(LARGE_TRIALS, options.trials)}
    for name in options.case or CASES:
        measure(name, trials.get(name, options.trials), sources)
    text, met = table(sources)
    print(text)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
