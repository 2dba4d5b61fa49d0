"""A worker's manners, with real processes: it rests, sleeps, stands back, and shows what it does."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
ENDLESS: dict[str, Any] = {**DIGITS_MLP, "rounds": 100_000, "checkpoint_every": 0, "evaluate_every": 0}
WITH_BATTERY = """
import sys
from pathlib import Path
from computeshare.host import linux_power
linux_power.FOLDER = Path(sys.argv.pop(1))
from computeshare.worker.process import main
main()
"""
"""A worker whose battery is files that the test writes."""
_IN_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""Takes standard input for the terminal it belongs to, so that Ctrl-C reaches it, and becomes the program named."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def worker(plane: ControlPlane, command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A worker started by hand, on a pipe, ended at the end of the block."""
    process = subprocess.Popen(
        command,
        env={**plane.environment, **environment},
        stderr=open(plane.home / "logs" / "manners.log", "a"),  # noqa: SIM115 - the process's own
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def listed(plane: ControlPlane, name: str) -> dict[str, Any]:
    """What REST says of a worker; empty while it is not there."""
    return next((dict(w) for w in plane.get("/v1/workers")["items"] if w["name"] == name), {})


def cancel(plane: ControlPlane, job_id: str) -> None:
    plane.http.post(f"/v1/jobs/{job_id}/cancel")
    plane.until("the end", lambda: plane.job(job_id)["status"] == "cancelled")


def moves_on(plane: ControlPlane, job_id: str) -> None:
    plane.reach(job_id, plane.job(job_id)["version"] + 5)


def charge(folder: Path, percent: int, plugged: bool) -> None:
    battery = {"type": "Battery", "capacity": str(percent), "status": "Charging" if plugged else "Discharging"}
    for name, values in {"AC": {"type": "Mains", "online": str(int(plugged))}, "BAT0": battery}.items():
        (folder / name).mkdir(exist_ok=True)
        for file, text in values.items():
            temporary = folder / name / f".{file}"
            temporary.write_text(text)
            temporary.replace(folder / name / file)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="batteries are files on Linux alone")
def test_a_worker_rests_on_a_low_battery_and_comes_back_by_itself(plane: ControlPlane, tmp_path: Path) -> None:
    charge(tmp_path, 80, plugged=False)
    flags = ["--queue", "battery", "--name", "laptop", "--battery-stop", "30", "--battery-start", "50"]
    job_id = plane.create(**{**ENDLESS, "queue": "battery"})
    with worker(plane, [sys.executable, "-c", WITH_BATTERY, str(tmp_path), *flags]) as process:
        plane.reach(job_id, 5)
        assert listed(plane, "laptop")["power"] == {"plugged": False, "percent": 80}
        charge(tmp_path, 30, plugged=False)
        plane.until("rest", lambda: listed(plane, "laptop")["resting"] == "on battery until 50 %")
        plane.until("no seat", lambda: listed(plane, "laptop")["seat"] is None)
        told = "Needs 1 worker on queue battery, 1 is online; 1 resting: on battery until 50 %"
        plane.until("the reason", lambda: plane.job(job_id)["reason"] == told)
        (mine,) = plane.get(f"/v1/jobs/{job_id}/workers")["items"]
        assert (mine["active"], mine["left_reason"]) == (False, "the worker was asked to leave")
        charge(tmp_path, 45, plugged=True)
        plane.until("still", lambda: listed(plane, "laptop")["resting"] == "charging until 50 %")
        assert process.poll() is None and listed(plane, "laptop")["seat"] is None
        charge(tmp_path, 50, plugged=True)
        plane.until("awake", lambda: listed(plane, "laptop")["resting"] is None)
        moves_on(plane, job_id)
        plane.until("no reason", lambda: plane.job(job_id)["reason"] is None)
    cancel(plane, job_id)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="logind is Linux alone")
def test_leases_go_back_before_the_machine_sleeps_and_the_worker_is_there_again_after(
    plane: ControlPlane, tmp_path: Path, mnist_dir: Path
) -> None:
    """Each work unit takes seconds here: whoever finished it would still be at it."""
    from tests.support.login_manager import login_manager, private_bus  # knows a bus, which other systems have not

    spec = {"dataset": "mnist", "model": "lenet5", "queue": "sleep", "micro_batch": 20_000, "rounds": 1000}
    job_id = plane.create(**spec, micro_batches_per_round=3)
    command = [sys.executable, "-m", "computeshare.worker.process", "--queue", "sleep", "--name", "sleeper"]
    with private_bus(tmp_path) as address, login_manager(address) as manager:
        told = {"DBUS_SYSTEM_BUS_ADDRESS": address, "COMPUTESHARE_DATA": str(mnist_dir)}
        with worker(plane, command, **told) as process:
            plane.until("a worker", lambda: plane.job(job_id)["workers"] == 1)
            plane.until("the lock", lambda: manager.holds("delay sleep"))
            if shutil.which("systemd-inhibit"):
                plane.until("it is kept awake", lambda: manager.holds("block-weak sleep:idle"))
            started = time.monotonic()
            manager.announce(True)
            plane.until("leave to sleep", lambda: not manager.holds("delay sleep"))
            assert time.monotonic() - started < 5  # logind waits no longer
            assert psutil.Process(process.pid).children() == [] and not manager.holds("block-weak sleep:idle")
            assert listed(plane, "sleeper")["resting"] == "its machine sleeps"
            plane.until("its goodbye", lambda: plane.job(job_id)["workers"] == 0, 5)
            manager.announce(False)
            plane.until("a worker", lambda: plane.job(job_id)["workers"] == 1)
            assert manager.holds("delay sleep") and listed(plane, "sleeper")["resting"] is None
    cancel(plane, job_id)


def test_a_seat_that_slept_unannounced_starts_over_at_once(plane: ControlPlane, tmp_path: Path) -> None:
    """The machine's sleep is a file here: so many seconds more on the clock that goes on meanwhile."""
    slept = tmp_path / "slept"
    slept.write_text("0")
    napping = f"""
import sys, time
from pathlib import Path
from computeshare.host import availability
through = availability._clock_through_sleep()
availability._clock_through_sleep = lambda: lambda: through() + float(Path({str(slept)!r}).read_text() or 0)
from computeshare.worker.process import main
main()
"""
    job_id = plane.create(**{**ENDLESS, "queue": "nap"})
    with worker(plane, [sys.executable, "-c", napping, "--queue", "nap", "--name", "napper"]) as process:
        plane.reach(job_id, 5)
        (seat,) = psutil.Process(process.pid).children()
        slept.write_text("3600")
        assert not psutil.wait_procs([seat], timeout=20)[1]
        its = f"/v1/jobs/{job_id}/workers"
        plane.until("its goodbye", lambda: plane.get(its)["items"][0]["left_reason"] == "its machine slept")
        plane.until("it again", lambda: plane.job(job_id)["workers"] == 1)
        moves_on(plane, job_id)
    cancel(plane, job_id)


def test_the_computing_stands_back_and_the_heartbeat_does_not(plane: ControlPlane) -> None:
    job_id = plane.create(**{**ENDLESS, "queue": "nice"})
    command = [sys.executable, "-m", "computeshare.worker.process", "--queue", "nice", "--nice", "7"]
    with worker(plane, command) as process:
        plane.until("a worker", lambda: plane.job(job_id)["workers"] == 1)
        itself = psutil.Process(process.pid)
        (seat,) = itself.children()
        assert (int(itself.nice()), int(seat.nice())) == (os.nice(0), os.nice(0) + 7)
        autogroups = [Path(f"/proc/{one.pid}/autogroup") for one in (itself, seat)]
        if autogroups[0].exists():
            own, lowered = (one.read_text().split() for one in autogroups)
            assert own[0] != lowered[0] and own[-1] == "0" and int(lowered[-1]) == os.nice(0) + 7
    cancel(plane, job_id)


class Terminal:
    """A worker in a terminal of its own, and what stands on it."""

    def __init__(self, plane: ControlPlane, *flags: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, "-m", "computeshare.worker.process", *flags],
            env={**plane.environment, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.raw = ""

    def read(self, patience_s: float) -> bool:
        """Take what has come by then; False once the other side is gone."""
        if not select.select([self.ours], [], [], patience_s)[0]:
            return True
        try:
            self.raw += os.read(self.ours, 1 << 16).decode(errors="replace")
        except OSError:  # the last process on it has ended
            return False
        return True

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw)

    def until(self, pattern: str) -> str:
        """Wait for a text; returns it."""
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline and self.read(0.2), f"{pattern} is not in {self.text[-2000:]}"
        return found[0]

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.write(self.ours, b"\x03")

    def ends(self) -> int:
        """Wait for the worker's end, all it has said taken."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-2000:]
            self.read(0.1)
        while self.read(0.1) and select.select([self.ours], [], [], 0)[0]:
            pass
        return self.process.returncode


@contextmanager
def terminal(plane: ControlPlane, *flags: str) -> Iterator[Terminal]:
    found = Terminal(plane, *flags)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(found.process.pid, signal.SIGKILL)
        found.process.wait()
        os.close(found.ours)


def test_one_live_line_in_a_terminal_and_the_first_ctrl_c_finishes_the_work_unit(plane: ControlPlane) -> None:
    with terminal(plane, "--queue", "line", "--name", "seen") as screen:
        screen.until("waiting for a seat")
        screen.until("worker ready")
        job_id = plane.create(**{**ENDLESS, "queue": "line"}, name="a job [bold]")
        screen.until("loading")
        line = screen.until(r"▶ a job \[bold\]  version [1-9]\d* of 100,000  [1-9][\d,]* samples/s  ↑ [1-9][^↑↓]+/s")
        assert "\n" not in line
        assert re.search(r"joined +device=.*model=mlp", screen.text)  # the seat's own words, above the line
        screen.interrupt()
        screen.until("finishing this work unit, Ctrl-C again to quit now")
        assert screen.ends() == 0
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is seen again
        plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0, 5)

        def reason() -> str:  # until its goodbye is read, it may be one that is not heard of any more
            (mine,) = plane.get(f"/v1/jobs/{job_id}/workers")["items"]
            return str(mine["left_reason"])

        plane.until("its goodbye", lambda: reason() == "the worker was asked to leave", 5)
    cancel(plane, job_id)


def test_the_second_ctrl_c_quits_now_and_leaves_terminal_and_leases_in_order(
    plane: ControlPlane, mnist_dir: Path
) -> None:
    """Each work unit takes seconds here: whoever finished it would still be there."""
    spec = {"dataset": "mnist", "model": "lenet5", "queue": "quit", "micro_batch": 20_000, "rounds": 1000}
    job_id = plane.create(**spec, micro_batches_per_round=3)
    with terminal(plane, "--queue", "quit", "--data", str(mnist_dir)) as screen:
        screen.until("version")
        plane.until("a worker", lambda: plane.job(job_id)["workers"] == 1)
        seats = psutil.Process(screen.process.pid).children()
        screen.interrupt()
        screen.until("finishing this work unit, Ctrl-C again to quit now")
        assert screen.process.poll() is None
        started = time.monotonic()
        screen.interrupt()
        assert screen.ends() == 0 and time.monotonic() - started < 5
        assert not psutil.wait_procs(seats, timeout=3)[1]
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")
        assert "quitting now" in screen.text
        its = f"/v1/jobs/{job_id}/workers"
        plane.until("its goodbye", lambda: plane.get(its)["items"][0]["left_reason"] == "asked to leave at once", 5)
    cancel(plane, job_id)


def test_a_seat_that_has_only_begun_to_load_is_not_waited_for(plane: ControlPlane) -> None:
    job_id = plane.create(**{**ENDLESS, "queue": "early"})
    with terminal(plane, "--queue", "early") as screen:
        plane.until("a seat", lambda: psutil.Process(screen.process.pid).children())
        screen.interrupt()
        assert screen.ends() == 0
    assert plane.job(job_id)["workers"] == 0
    cancel(plane, job_id)


def test_without_a_terminal_there_are_plain_lines(plane: ControlPlane) -> None:
    job_id = plane.create(**{**ENDLESS, "queue": "plain"})
    with plane.worker("plain", "plain") as process:
        plane.reach(job_id, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    log = (plane.home / "logs" / "worker-plain.log").read_text()
    assert "\x1b" not in log and "▶" not in log
    told = ["worker ready", "joined", "finishing this work unit, again to quit now", "leaving"]
    assert [word for word in told if word not in log] == []
    cancel(plane, job_id)
