"""A Linux machine's notices of sleep from logind, which waits a few seconds for holders of a delay lock."""

import contextlib
from collections.abc import Callable

from jeepney import DBusAddress, HeaderFields, MatchRule, message_bus, new_method_call
from jeepney.fds import FileDescriptor
from jeepney.io.blocking import DBusConnection, Proxy, open_dbus_connection
from jeepney.wrappers import unwrap_msg

_PATH, _NAME = "/org/freedesktop/login1", "org.freedesktop.login1"
_MANAGER = DBusAddress(_PATH, bus_name=_NAME, interface=f"{_NAME}.Manager")
_SIGNAL = {"type": "signal", "interface": f"{_NAME}.Manager", "member": "PrepareForSleep", "path": _PATH}


def follow(before: Callable[[], None], after: Callable[[], None], ready: Callable[[], None] = lambda: None) -> None:
    """Call `before` ahead of every sleep, which waits until `before` returns, and `after` when the sleep is over.

    Args:
        ready: called once signals are subscribed.
    Raises OSError, jeepney's errors: there is no bus or no logind, or the connection was lost.
    """
    with open_dbus_connection(bus="SYSTEM", enable_fds=True) as connection:
        bus = Proxy(message_bus, connection, timeout=10)
        bus.AddMatch(MatchRule(sender=_NAME, **_SIGNAL))
        lock: FileDescriptor | None = _delay(connection)
        ready()
        with connection.filter(MatchRule(**_SIGNAL), bufsize=16) as signals:
            while True:
                signal = connection.recv_until_filtered(signals)
                if (signal.header.fields[HeaderFields.sender],) != bus.GetNameOwner(_NAME):
                    continue  # any client of the bus can send a signal
                (sleeps,) = signal.body
                if not sleeps:
                    lock = lock or _delay(connection)
                    after()
                    continue
                try:
                    before()
                finally:
                    if lock:
                        lock.close()  # which lets the machine sleep
                        lock = None


def _delay(connection: DBusConnection) -> FileDescriptor | None:
    """A lock that delays sleep until it is closed; None if the machine's policy refuses the lock."""
    wanted = ("sleep", "ComputeShare", "handing leases back", "delay")
    with contextlib.suppress(Exception):  # without the lock, `before` runs while the machine goes to sleep
        reply = connection.send_and_get_reply(new_method_call(_MANAGER, "Inhibit", "ssss", wanted), timeout=10)
        (lock,) = unwrap_msg(reply)
        return lock if isinstance(lock, FileDescriptor) else None
    return None
