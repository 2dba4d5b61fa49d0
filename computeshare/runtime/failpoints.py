"""Named places at which a test can make the process die, stop, wait or fail. In production each is a no-op.

COMPUTESHARE_FAILPOINTS arms them, either as a list, `after_push=kill@3;before_commit=sleep:2`, or as the path of a
folder: a file in the folder, named as a failpoint, holds the action, and the first process that passes the failpoint
removes the file. docs/reliability.md lists the names.
"""

import functools
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from computeshare.errors import FailpointError

VARIABLE = "COMPUTESHARE_FAILPOINTS"
_ACTION = re.compile(r"(kill|stop|error|sleep:(\d+(?:\.\d+)?))(?:@(\d+|\*))?")


@dataclass(frozen=True, slots=True)
class Action:
    """The action at a process's `passing`-th pass through a failpoint, or at every pass if `passing` is 0. `kill` and
    `stop` send SIGKILL and SIGSTOP to the process itself.
    """

    kind: str
    seconds: float = 0.0
    passing: int = 1

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse `kill`, `stop`, `error` or `sleep:SECONDS`, optionally with `@PASSING` or `@*`. Raises ValueError."""
        match = _ACTION.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{VARIABLE}: {text!r} is none of kill, stop, error, sleep:SECONDS (and @PASSING or @*)")
        passing = 0 if match[3] == "*" else int(match[3] or 1)
        return cls(match[1].split(":")[0], float(match[2] or 0), passing)

    def act(self, name: str) -> None:
        """Carry out the action. Raises FailpointError for `error`."""
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(self.seconds)
            case _:
                raise FailpointError(f"failpoint {name}")


class Listed:
    """Failpoints armed by a list; each acts once in a process, or at every pass with `@*`."""

    def __init__(self, text: str) -> None:
        pairs = [pair.partition("=") for pair in text.split(";") if pair.strip()]
        self._actions = {name.strip(): Action.parse(action) for name, _, action in pairs}
        self._passed: Counter[str] = Counter()

    def armed(self, name: str) -> bool:
        return name in self._actions

    def passed(self, name: str) -> None:
        if action := self._actions.get(name):
            self._passed[name] += 1
            if action.passing in (0, self._passed[name]):
                action.act(name)


class Folder:
    """Failpoints armed by files while the processes run; each file acts once, in the first process to remove it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def armed(self, name: str) -> bool:
        return (self._path / name).exists()

    def passed(self, name: str) -> None:
        file = self._path / name
        try:
            action = Action.parse(file.read_text())
            file.unlink()
        except FileNotFoundError:
            return
        action.act(name)


def failpoint(name: str) -> None:
    """Mark a place at which a test may make this process fail. Raises FailpointError if armed with `error`."""
    if (points := _points()) is not None:
        points.passed(name)


def armed(name: str) -> bool:
    """Whether this failpoint is armed, for code that splits one step into two only under test."""
    points = _points()
    return points is not None and points.armed(name)


@functools.cache
def _points() -> Listed | Folder | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    return Folder(Path(text)) if text.startswith("/") else Listed(text)
