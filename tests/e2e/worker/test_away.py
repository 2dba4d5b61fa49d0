"""Processes whose broker is away: they wait for it as long as it takes, and leave at once when they are asked to."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from computeshare.up.embedded_broker import free_port

pytestmark = pytest.mark.e2e
LEAVING_S = 30
"""Within which a process leaves on the busiest machine; those that wait for their broker first take minutes."""
READY = {"reducer": "reducer ready", "evaluator": "evaluator ready", "worker": "broker away"}


@contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield int(listener.getsockname()[1])


@contextmanager
def nobody() -> Iterator[int]:
    """A port where nobody listens."""
    yield free_port()


@contextmanager
def started(role: str, port: int, home: Path) -> Iterator[subprocess.Popen[str]]:
    """The process, once it looks for its broker."""
    environment = {**os.environ, "COMPUTESHARE_REDIS_URL": f"redis://:x@127.0.0.1:{port}/0"}
    environment["COMPUTESHARE_HOME"] = str(home)
    command = [sys.executable, "-m", f"computeshare.{role}.process", *(["--queue", "q"] if role == "worker" else [])]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        assert any(READY[role] in line for line in process.stderr)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("link", [nobody, black_hole])
@pytest.mark.parametrize(("role", "number"), [("reducer", signal.SIGTERM), ("evaluator", signal.SIGTERM)])
def test_a_reducer_or_evaluator_without_a_broker_leaves_when_it_is_told(
    tmp_path: Path, role: str, number: int, link: object
) -> None:
    with link() as port, started(role, port, tmp_path) as process:  # type: ignore[operator]
        process.send_signal(number)
        assert process.wait(LEAVING_S) == 0


def test_an_idle_worker_without_a_broker_leaves_at_the_first_interrupt(tmp_path: Path) -> None:
    with nobody() as port, started("worker", port, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(LEAVING_S) == 0
