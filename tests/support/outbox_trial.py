"""A control plane's work in a process that kills itself at a named point; see `test_outbox_kills.py`."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.database import Database
from api.jobs.service import Jobs
from api.scheduler.dispatcher import Dispatcher
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import SeatQueue
from computeshare.transport.connections import connect

PRELOADED = ["api.database", "api.scheduler.dispatcher", "api.jobs.service"]
"""What takes long to import, so that a fork server does it once."""
KEY = "the-same-request"

POINTS: dict[str, tuple[type, str]] = {
    "after the job is stored": (Jobs, "create"),
    "after the job is published": (RoundStore, "publish"),
    "after the seats are decided": (Dispatcher, "_write"),
    "after a seat is handed over": (SeatQueue, "enqueue"),
}
"""Where the process dies: after this method has run, before anything is written down about it."""


def spec(queue: str) -> JobSpec:
    return JobSpec(dataset="digits", model="mlp", queue=queue, rounds=2)


def kill_at(owner: type, name: str, times: int) -> None:
    """Make this process die by SIGKILL once the method has run so many times."""
    method: Callable[..., Any] = getattr(owner, name)
    left = [times]

    def dying(*arguments: Any, **named: Any) -> Any:
        answer = method(*arguments, **named)
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, dying)


def serve(url: str, redis_url: str, folder: str, queue: str, point: str | None, times: int) -> None:
    """A control plane's work: take the request, then a few turns of the dispatcher."""
    if point:
        owner, name = POINTS[point]
        kill_at(owner, name, times)
    database, redis = Database(url), connect(redis_url, retries=0)
    Jobs(database, Path(folder)).create(spec(queue), KEY)
    dispatcher = Dispatcher(database, Path(folder))
    for _ in range(3):
        dispatcher.step(redis)
