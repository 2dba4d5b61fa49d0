"""A real worker process does what it is asked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from redis import Redis

from computeshare.jobspec.machine_needs import MachineFacts
from computeshare.queue import Orders, give_orders, list_workers
from computeshare.terminal.command import REMOVED
from computeshare.training import devices
from computeshare.up.stack import Child
from computeshare.worker.status_file import Running
from tests.support.wait import wait_until


@contextmanager
def started(url: str, home: Path, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A worker's process until the end of the block."""
    command = [sys.executable, "-m", "computeshare.worker.process", "--redis-url", url, "--device", "cpu", *flags]
    environment = {**os.environ, "COMPUTESHARE_HOME": str(home), **variables}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_that_is_asked_to_leave_for_good_says_why_and_ends_with_a_code_of_its_own(
    own: Redis, own_url: str, tmp_path: Path
) -> None:
    flags = ("--label", "room=attic", "--label", "floor=2", "--max-memory", "1GB")
    with started(own_url, tmp_path, *flags, COMPUTESHARE_LABELS="room=cellar") as process:
        wait_until(lambda: list_workers(own) or process.poll() is not None)
        (worker,) = list_workers(own)
        device = devices.describe(torch.device("cpu"))  # as in the jobs where it takes part
        assert worker.machine == MachineFacts(10**9, device, {"room": "attic", "floor": "2"})
        give_orders(own, {worker.id: Orders(dismissed="a user removed this worker")})
        _, said = process.communicate(timeout=30)
    assert process.returncode == REMOVED
    assert "leaving for good" in said and "a user removed this worker" in said
    assert "Traceback" not in said
    assert list_workers(own) == []


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_worker_that_its_owner_stops_ends_with_that_code_however_many_signals_strike_its_end(
    own: Redis, own_url: str, tmp_path: Path, is_ready: bool
) -> None:
    with started(own_url, tmp_path) as process:
        wait_until(lambda: process.poll() is not None or (list_workers(own) if is_ready else Running.all(tmp_path)))
        (worker,) = Running.all(tmp_path)
        worker.ask_to_stop()
        wait_until(lambda: process.poll() is not None or process.terminate())
        _, said = process.communicate(timeout=30)
    assert process.returncode == REMOVED, said
    assert "Traceback" not in said
    assert Running.all(tmp_path) == [] and list_workers(own) == []


class Ended:
    """A process that has ended with some code."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(
    ("code", "again"), [(REMOVED, False), (0, True), (1, True), (-15, True), (-9, True), (5, True)]
)
def test_up_starts_a_worker_again_unless_a_user_removed_it(code: int, again: bool) -> None:
    started: list[int] = []

    def start() -> Ended:
        started.append(code)
        return Ended(code)

    worker = Child("worker", start, may_leave=True)
    assert worker.ensure(now=0.0)
    assert worker.ensure(now=100.0) is again
    other = Child("reducer", start)
    other.ensure(now=0.0)
    assert other.ensure(now=100.0)
