"""However `computeshare up` ends, nothing that it started outlives it for long, and no temporary folder is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from computeshare.up.embedded_broker import free_port
from tests.support.control_plane import control_plane
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
PATIENCE_S = 4.0
"""The watcher of the broker looks every two seconds."""


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_up_listens_on_this_machine_alone_unless_asked(tmp_path: Path) -> None:
    with control_plane(tmp_path / "home") as plane, plane.worker("near"):
        up = psutil.Process(plane.process.pid)
        processes = [up, *up.children(recursive=True)]
        found = [one.laddr for each in processes for one in each.net_connections("inet") if one.status == "LISTEN"]
        assert urlsplit(plane.url).port in [address.port for address in found]
        assert {address.ip for address in found} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_up_that_ends_while_its_fork_server_imports_torch(tmp_path: Path, number: int) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "COMPUTESHARE_HOME": str(tmp_path / "home")}
    port = free_port()
    command = [sys.executable, "-m", "computeshare.cli.main", "up", "--port", str(port)]
    up = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    wait_until(lambda: listens(port))
    started = psutil.Process(up.pid).children(recursive=True)
    assert any("multiprocessing.forkserver" in " ".join(process.cmdline()) for process in started)

    up.send_signal(number)
    up.wait()
    deadline = time.monotonic() + PATIENCE_S
    while left := [process for process in started if alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert [path.name for path in temporary.glob("pymp-*")] == []
