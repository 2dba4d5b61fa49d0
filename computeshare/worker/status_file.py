"""Workers' status for their machine's owner: a file per worker in `HOME/workers`, which only the owner can read.

`computeshare-worker status` shows the files, `computeshare-worker stop` asks the process to end.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Self

import psutil
from filelock import FileLock
from pydantic import BaseModel, ValidationError

from computeshare.runtime.private_files import write_private

FOLDER = "workers"
TOTALS = "traffic"
ASKED_TO_STOP = ".stop"
SAVE_S = 10.0
"""Seconds between additions to the home's totals; a worker that is killed loses this much."""
SAME_START_S = 1.0
"""How far the system's statements of when a process began may differ."""


class WorkerLimits(BaseModel):
    """The owner's limits on a worker, as typed."""

    max_up: str | None = None
    max_memory: str | None = None
    cache: str | None = None
    nice: int = 0
    hours: list[str] = []
    only_on_power: bool = False
    battery_stop: float | None = None
    battery_start: float | None = None


class CurrentJob(BaseModel):
    """The job that a worker trains."""

    id: str
    name: str = ""
    creator: str = ""
    """The name of whoever created it."""
    version: int = 0
    rounds: int = 0
    recipe: str = ""
    """The digest or the package of its code, if it is a recipe."""
    units: list[int] = []
    """The units that each of the worker's devices has computed in this seat."""
    stopped: list[int] = []
    """The places of devices that failed."""


class Moved(BaseModel):
    """Bytes of updates, weights and files that were sent and received, since a time (seconds since 1970)."""

    bytes_up: int = 0
    bytes_down: int = 0
    since: float = 0.0


class WorkerStatus(BaseModel):
    """A worker's status. Times are seconds since 1970."""

    id: str
    name: str
    pid: int
    began: float
    """When the process began, by the system: with `pid` it names the process, whose number may be used again."""
    control_plane: str
    """The address of its gateway or broker, without secrets."""
    invite: str = ""
    queues: list[str]
    device: str
    state: Literal["connecting", "idle", "busy", "resting", "ended"] = "connecting"
    resting: str = ""
    heard: float | None = None
    """When the broker last answered."""
    job: CurrentJob | None = None
    recipes: list[str] = []
    confinement: str = ""
    """By what recipes are confined."""
    limits: WorkerLimits = WorkerLimits()
    upgrades: bool = False
    """Whether it installs the control plane's version when its own does not fit."""
    moved: Moved = Moved()
    """By this process."""

    @property
    def is_running(self) -> bool:
        """Whether the process that wrote this still runs."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.began) < SAME_START_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


class StatusFile:
    """One worker's file, written by that worker. A full disk or the like never disturbs the worker.

    Args:
        moved: returns how many bytes this process has sent and received.
    """

    def __init__(self, home: Path, status: WorkerStatus, moved: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self._folder, self.status, self._moved = home / FOLDER, status, moved
        self._path = self._folder / f"{status.id}.json"
        self._added, self._saved_at = (0, 0), time.monotonic()
        self._asked = False

    def write(self, **changes: object) -> None:
        """Replace the file: these fields have changed."""
        up, down = self._moved()
        moved = Moved(bytes_up=up, bytes_down=down, since=self.status.began)
        self.status = self.status.model_copy(update={**changes, "moved": moved})
        with contextlib.suppress(OSError):
            write_private(self._path, self.status.model_dump_json())
            if time.monotonic() - self._saved_at > SAVE_S:
                self._add_to_totals()

    def remove(self) -> None:
        """The worker ends: add its bytes to the totals, and leave no file."""
        with contextlib.suppress(OSError):
            self._add_to_totals()
        for path in (self._path, self._path.with_suffix(ASKED_TO_STOP)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the owner has asked this worker to end for good."""
        self._asked = self._asked or self._path.with_suffix(ASKED_TO_STOP).exists()
        return self._asked

    def _add_to_totals(self) -> None:
        now = self._moved()
        with _totals_lock(self._folder):
            totals = read_totals(self._folder.parent)
            up, down = (each - before for each, before in zip(now, self._added, strict=True))
            since = totals.since or self.status.began
            totals = Moved(bytes_up=totals.bytes_up + up, bytes_down=totals.bytes_down + down, since=since)
            write_private(self._folder / TOTALS, totals.model_dump_json())
        self._added, self._saved_at = now, time.monotonic()


class Running:
    """A worker of this home, as its owner sees it."""

    def __init__(self, path: Path, status: WorkerStatus) -> None:
        self._path, self.status = path, status

    @classmethod
    def all(cls, home: Path) -> "list[Self]":
        """The workers of this home that have a file, oldest first. One that was killed is `ended`, and listed once."""
        found = []
        for path in sorted((home / FOLDER).glob("*.json")):
            try:
                one = cls(path, WorkerStatus.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError):  # it ends just now, or another version wrote it
                continue
            if not one.status.is_running:
                one.status = one.status.model_copy(update={"state": "ended", "job": None})
                one._forget()
            found.append(one)
        return sorted(found, key=lambda one: one.status.began)

    def ask_to_stop(self, now: bool = False) -> None:
        """Ask it to end for good after its work unit; with `now`, at once. Raises OSError: that is not allowed."""
        self._path.with_suffix(ASKED_TO_STOP).touch(mode=0o600)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.status.pid)
            process.terminate()
            if now:
                time.sleep(0.5)  # two signals at once could arrive as one
                process.terminate()

    def wait(self) -> None:
        """Wait until the process has ended."""
        while self.status.is_running:
            time.sleep(0.1)
        self._forget()

    def _forget(self) -> None:
        for path in (self._path, self._path.with_suffix(ASKED_TO_STOP)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def began() -> float:
    """When this process began, in seconds since 1970, as `WorkerStatus.began`."""
    return float(psutil.Process(os.getpid()).create_time())


def read_totals(home: Path) -> Moved:
    """The bytes of all workers of this home, those that have ended included."""
    try:
        return Moved.model_validate_json((home / FOLDER / TOTALS).read_bytes())
    except (OSError, ValidationError):
        return Moved()


def described(job_id: str, spec: str | None, creator: str = "") -> CurrentJob:
    """A job, by the specification that the broker holds, and its creator's name."""
    try:
        said = json.loads(spec or "{}")
        name, recipe = str(said.get("name") or ""), str(said.get("recipe") or "")
        return CurrentJob(id=job_id, name=name, creator=creator, recipe=recipe)
    except (ValueError, AttributeError):
        return CurrentJob(id=job_id, creator=creator)


@contextlib.contextmanager
def _totals_lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{TOTALS}.lock", timeout=2):  # Timeout is an OSError
        yield
