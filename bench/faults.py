"""Fault injection into real processes: SIGKILL, or SIGSTOP with a later SIGCONT, at once or at a failpoint."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from bench.stage import Stage

FAILPOINTS = (
    "after_compute",
    "before_push",
    "between_stage_and_submit",
    "after_push",
    "in_leave",
    "after_gather",
    "before_commit",
    "after_commit",
    "after_state",
    "in_checkpoint",
    "before_announce",
    "before_delivery",
    "after_delivery",
    "in_projection",
    "before_trim",
)
KINDS = (
    "kill worker",
    "kill seat",
    "kill reducer",
    "kill api",
    "kill evaluator",
    "kill forkserver",
    "kill broker",
    "stop worker",
    "stop seat",
    "stop reducer",
    "stop api",
    "stop broker",
    "failpoint",
)
LONGEST_STOP_S = 3.0


@dataclass
class Faults:
    """Injects random faults into one stage, and keeps track of the stopped processes."""

    stage: Stage
    rng: random.Random
    job_id: str
    longest_stop_s: float = LONGEST_STOP_S
    told: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _asleep: list[psutil.Process] = field(default_factory=list)

    def strike(self, kinds: Sequence[str] = KINDS) -> str:
        """Inject one fault of a random kind; returns its description, with `nothing` if there was no such process."""
        kind = self.rng.choice(kinds)
        verb, _, role = kind.partition(" ")
        if kind == "failpoint":
            name = self.rng.choice(FAILPOINTS)
            (self.stage.failpoints / name).write_text(self.rng.choice(("kill", "kill", "sleep:1")))
            return self._tell(f"failpoint {name}")
        victims = self._victims(role)
        if not victims:
            return self._tell(f"{kind}: nothing")
        if verb == "kill":
            victims = victims[:1]
            _send(victims, signal.SIGKILL)
        else:
            _send(victims, signal.SIGSTOP)
            self._asleep += victims
            # In a thread of its own: a caller that talks to a stopped process would hang with it.
            waking = threading.Timer(self.rng.uniform(0.3, self.longest_stop_s), _send, (victims, signal.SIGCONT))
            waking.daemon = True
            waking.start()
        return self._tell(f"{kind}: {[process.pid for process in victims]}")

    def _victims(self, role: str) -> list[psutil.Process]:
        """The processes of a fault: SIGKILL goes to the first only, SIGSTOP to all."""
        choose: Callable[[list[psutil.Process]], list[psutil.Process]]
        choose = lambda found: [self.rng.choice(found)] if found else []  # noqa: E731
        match role:
            case "worker":
                chosen = choose(self.stage.worker_processes())
                with contextlib.suppress(psutil.Error):
                    return [*chosen, *(child for process in chosen for child in process.children())]
                return chosen
            case "seat":
                return choose(self.stage.seats())
            case "reducer":
                found = self.stage.active_reducer(self.job_id)
            case "forkserver":
                found = self.stage.fork_server()
            case _:
                found = self.stage.process(role)
        return [found] if found else []

    def calm(self) -> None:
        """End all faults: continue every stopped process, disarm every failpoint."""
        _send(self._asleep, signal.SIGCONT)
        self._asleep.clear()
        for armed in self.stage.failpoints.iterdir():
            armed.unlink(missing_ok=True)

    def _tell(self, what: str) -> str:
        self.told.append(f"{time.monotonic() - self._started:6.2f} s {what}")
        return what


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it died by itself, or of another fault
            process.send_signal(number)
