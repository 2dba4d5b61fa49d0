"""A bus of the test's own with a login manager on it that speaks as logind does, through the same library."""

import contextlib
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jeepney import DBusAddress, HeaderFields, MessageType, message_bus, new_method_return, new_signal
from jeepney.io.blocking import DBusConnection, Proxy, open_dbus_connection

from tests.support.requirements import lacking

NAME = "org.freedesktop.login1"
_MANAGER = DBusAddress("/org/freedesktop/login1", interface=f"{NAME}.Manager")
_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:tmpdir=/tmp</listen>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/>
  </policy>
</busconfig>
"""


@contextmanager
def private_bus(folder: Path) -> Iterator[str]:
    """A bus daemon's address; where there is no daemon the test is skipped, and fails in CI."""
    if not shutil.which("dbus-daemon"):
        lacking("no dbus-daemon: install dbus")
    config = folder / "bus.conf"
    config.write_text(_CONFIG)
    command = ["dbus-daemon", f"--config-file={config}", "--nofork", "--print-address"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            yield daemon.stdout.readline().strip()
        finally:
            daemon.terminate()


class LoginManager(threading.Thread):
    """Hands out locks and announces sleep."""

    def __init__(self, address: str, named: bool = True) -> None:
        super().__init__(daemon=True)
        self._bus = open_dbus_connection(address, enable_fds=True)
        if named:
            Proxy(message_bus, self._bus).RequestName(NAME)
        self._wanted: queue.Queue[bool] = queue.Queue()
        self._over = threading.Event()
        self._locks: list[tuple[str, int]] = []

    def announce(self, sleeps: bool) -> None:
        """Tell everyone that the machine is about to sleep, or awake again."""
        self._wanted.put(sleeps)

    def holds(self, lock: str) -> bool:
        """Whether anybody has such a lock now, for example `delay sleep`."""
        return any(name == lock and _is_held(end) for name, end in list(self._locks))

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(queue.Empty):
                signal = new_signal(_MANAGER, "PrepareForSleep", "b", (self._wanted.get_nowait(),))
                self._bus.send(signal)
            with contextlib.suppress(TimeoutError):
                self._answer(self._bus)
        self._bus.close()

    def _answer(self, bus: DBusConnection) -> None:
        call = bus.receive(timeout=0.02)
        if call.header.message_type == MessageType.method_call and call.header.fields[HeaderFields.member] == "Inhibit":
            ours, theirs = os.pipe()
            what, _, _, mode = call.body
            self._locks.append((f"{mode} {what}", ours))
            with open(theirs, "wb", buffering=0) as file:
                bus.send(new_method_return(call, "h", (file,)))

    def stop(self) -> None:
        self._over.set()
        self.join()
        for _, end in self._locks:
            os.close(end)


def _is_held(end: int) -> bool:
    """Whether somebody has the other end of this pipe open."""
    os.set_blocking(end, False)
    try:
        return os.read(end, 1) != b""
    except BlockingIOError:
        return True


@contextmanager
def login_manager(address: str) -> Iterator[LoginManager]:
    manager = LoginManager(address)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()
